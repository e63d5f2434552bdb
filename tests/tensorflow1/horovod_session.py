"""A program of TensorFlow 1 with Horovod and `sess.run`. Only its imports are changed, and weights are broadcast.

phalanx run -np 2 horovod_session.py FOLDER
"""

import json
import os
import sys

import numpy as np

import phalanx.compat.v1 as tf
import phalanx.horovod.tensorflow as hvd

hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
sess = tf.Session(config=config)

input_data = tf.placeholder(tf.float32, shape=[None, 784])
target = tf.placeholder(tf.float32, shape=[None, 10])
hidden1 = tf.layers.dense(input_data, 128)
hidden2 = tf.layers.dense(hidden1, 64)
output = tf.layers.dense(hidden2, 10)
loss = tf.losses.softmax_cross_entropy(target, output)
optimizer = hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.01 * hvd.size()))
global_step = tf.train.get_or_create_global_step()
train_op = optimizer.minimize(loss, global_step=global_step)
mean_loss = hvd.allreduce(loss)
init_op = tf.global_variables_initializer()
sess.run(init_op)
sess.run(hvd.broadcast_global_variables(0))

random = np.random.default_rng(0)
labels = random.integers(0, 10, 64)
images = np.eye(10, 784)[labels] * 3 + random.normal(size=(64, 784)) / 10
targets = np.eye(10)[labels]
losses = []
for _ in range(4):
    for i in range(0, len(images), 8 * hvd.size()):
        part = slice(i + 8 * hvd.rank(), i + 8 * hvd.rank() + 8)
        feeds = {input_data: images[part], target: targets[part]}
        _, loss_value, step = sess.run([train_op, mean_loss, global_step], feed_dict=feeds)
        losses.append(float(loss_value))
weights = sess.run(tf.trainable_variables())
with open(os.path.join(sys.argv[1], f"found.{hvd.rank()}"), "w") as file:
    json.dump({"losses": losses, "step": int(step), "weights": [float(np.sum(each)) for each in weights]}, file)
