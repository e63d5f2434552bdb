"""To the structure of TensorFlow's guide "Distributed training with TensorFlow"."""

import keras
import numpy as np
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import report

keras.utils.set_random_seed(1)
mirrored_strategy = distribute.MirroredStrategy()

# `fit` on a dataset, then on arrays.
with mirrored_strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(1,), kernel_regularizer=keras.regularizers.L2(1e-4))])
    model.compile(loss="mse", optimizer="sgd")

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
model.fit(dataset, epochs=2)
evaluated = model.evaluate(dataset)
inputs, targets = np.ones((100, 1)), np.ones((100, 1))
history = model.fit(inputs, targets, epochs=2, batch_size=10).history

# The global batch from the number of replicas, and a learning rate for it.
BATCH_SIZE_PER_REPLICA = 4
global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100)
dataset = dataset.batch(global_batch_size)
LEARNING_RATES_BY_BATCH_SIZE = {4: 0.1, 8: 0.15, 16: 0.175}
learning_rate = LEARNING_RATES_BY_BATCH_SIZE[global_batch_size]

# A custom training loop.
with mirrored_strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(1,), kernel_regularizer=keras.regularizers.L2(1e-4))])
    optimizer = keras.optimizers.SGD(learning_rate=learning_rate)

dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


def train_step(inputs):
    features, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        per_batch_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_batch_loss, global_batch_size=global_batch_size)
        loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def distributed_train_step(dist_inputs):
    per_replica_losses = mirrored_strategy.run(train_step, args=(dist_inputs,))
    return mirrored_strategy.reduce(distribute.ReduceOp.SUM, per_replica_losses, axis=None)


losses = [distributed_train_step(dist_inputs) for dist_inputs in dist_dataset]
iterator = iter(dist_dataset)
for _ in range(10):
    losses.append(distributed_train_step(next(iterator)))
print(float(losses[-1]))

report(evaluated=evaluated, history=history["loss"], losses=losses, weights=model.get_weights())
