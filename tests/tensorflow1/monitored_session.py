"""A program of TensorFlow 1 with MonitoredTrainingSession; the chief may kill the parameter server once.

phalanx run --ps 1 --workers 2 monitored_session.py FOLDER STEPS [synchronous] [kills]
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

import phalanx.compat.v1 as tf

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
server = tf.train.Server()
job_name, task_index = server.server_def.job_name, server.server_def.task_index
if job_name == "ps":
    (folder / "ps").write_text(str(os.getpid()))
    server.join()
is_chief = task_index == 0
cluster = tf.train.ClusterSpec(server.server_def.cluster)
with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{task_index}", cluster=cluster)):
    X = tf.placeholder(tf.float32, [None])
    Y = tf.placeholder(tf.float32, [None])
    w = tf.get_variable("w", initializer=[0.0])
    global_step = tf.train.get_or_create_global_step()
    cost = tf.reduce_mean(tf.square(Y - X * w))
    optimizer = tf.train.MomentumOptimizer(0.1, 0.5)
    hooks = [tf.train.StopAtStepHook(last_step=steps)]
    if "synchronous" in sys.argv:
        optimizer = tf.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=2, total_num_replicas=2)
        hooks.append(optimizer.make_session_run_hook(is_chief))
    train_op = optimizer.minimize(cost, global_step=global_step)
x = np.linspace(-1, 1, 20)
kills = is_chief and "kills" in sys.argv
with tf.train.MonitoredTrainingSession(
    master=server.target,
    is_chief=is_chief,
    checkpoint_dir=str(folder / "checkpoints"),
    save_checkpoint_steps=10,
    save_checkpoint_secs=None,
    hooks=hooks,
) as session:
    found = []
    while not session.should_stop():
        _, step, value = session.run([train_op, global_step, w], {X: x, Y: 2 * x})
        found.append((int(step), float(value[0])))
        if kills and step > steps // 2:
            os.kill(int((folder / "ps").read_text()), signal.SIGKILL)
            kills = False
(folder / f"found.{task_index}").write_text(json.dumps(found))
