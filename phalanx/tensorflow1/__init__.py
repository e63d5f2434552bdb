"""TensorFlow 1's distributed training: `phalanx.compat.v1` exports it under TensorFlow's names.

Graphs, sessions and the servers that hold variables are TensorFlow's: TensorFlow places each operation of a graph on a
task and runs it there, including queues, sparse updates, accumulators and everything else a graph can contain. To keep
variables on Phalanx's parameter servers instead, Phalanx would have to replace each update operation of each optimizer.
Updates that are not an optimizer's (a moving average, a counter, an accumulator of `SyncReplicasOptimizer`) would be
lost or only approximated.

Phalanx adds what these servers lack: the cluster of `phalanx run` or TF_CONFIG (`graph_server`), bounded waits that
name the missing tasks (`task_probe`, `session_setup`), the names of lost tasks, and an end for `join`.
"""
