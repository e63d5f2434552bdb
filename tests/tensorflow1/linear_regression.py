"""A program of TensorFlow 1 with a parameter server and a Supervisor: y = 2 x + 0.5. Only its import is changed.

phalanx run --ps 1 --workers 2 linear_regression.py FOLDER STEPS
"""

import json
import os
import sys

import numpy as np

import phalanx.compat.v1 as tf

folder, steps = sys.argv[1], int(sys.argv[2])
train_x = np.linspace(-1, 1, 20)
train_y = 2 * train_x + 0.5

config = json.loads(os.environ["TF_CONFIG"])
job_name, task_index = config["task"]["type"], config["task"]["index"]
cluster = tf.train.ClusterSpec(config["cluster"])
server = tf.train.Server(cluster, job_name=job_name, task_index=task_index)
if job_name == "ps":
    print("wait")
    server.join()

worker_device = f"/job:worker/task:{task_index}"
with tf.device(tf.train.replica_device_setter(worker_device=worker_device, cluster=cluster)):
    X = tf.placeholder("float")
    Y = tf.placeholder("float")
    w = tf.Variable(tf.random_normal([1]), name="weight")
    b = tf.Variable(tf.zeros([1]), name="bias")
    global_step = tf.train.get_or_create_global_step()
    z = tf.multiply(X, w) + b
    tf.summary.histogram("z", z)
    cost = tf.reduce_mean(tf.square(Y - z))
    tf.summary.scalar("loss_function", cost)
    optimizer = tf.train.GradientDescentOptimizer(0.05).minimize(cost, global_step=global_step)
    saver = tf.train.Saver(max_to_keep=1)
    merged_summary_op = tf.summary.merge_all()
    init = tf.global_variables_initializer()

sv = tf.train.Supervisor(
    is_chief=(task_index == 0),
    logdir=folder,
    init_op=init,
    summary_op=None,
    saver=saver,
    global_step=global_step,
    save_model_secs=5,
)
with sv.managed_session(server.target) as sess:
    epoch = first = global_step.eval(session=sess)
    own = 0
    while epoch < first + steps and not sv.should_stop():
        for x, y in zip(train_x, train_y, strict=True):
            _, epoch = sess.run([optimizer, global_step], feed_dict={X: x, Y: y})
            own += 1
        summary_str = sess.run(merged_summary_op, feed_dict={X: x, Y: y})
        sv.summary_computed(sess, summary_str, global_step=epoch)
    if task_index == 0:
        sv.saver.save(sess, sv.save_path, global_step=epoch)
    found = {"first": int(first), "own": own, "step": int(epoch), "device": w.device}
    found["w"], found["b"] = (float(value[0]) for value in sess.run([w, b]))
    with open(os.path.join(folder, f"found.{task_index}"), "w") as file:
        json.dump(found, file)
sv.stop()
