"""TensorFlow 1's distributed training: `phalanx.compat.v1` exports it under TensorFlow's names.

A graph and its session are TensorFlow's own, and so are the servers that keep its variables: TensorFlow places each
operation of a graph on a task, and runs it there, with queues, sparse updates, accumulators and whatever else a graph
can have. Keeping variables on Phalanx's parameter servers instead would mean to replace each update operation of each
optimizer by one of ours: what is not an optimizer's update (a moving average, a counter, an accumulator of
`SyncReplicasOptimizer`) would be lost or become only nearly the same.

Phalanx adds what these servers lack: the cluster of `phalanx run` or TF_CONFIG (`graph_server`), waits that are bounded
and name who is missing (`task_probe`, `session_setup`), the name of a task that is lost, and an end for `join`.
"""
