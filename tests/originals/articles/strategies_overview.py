"""To the structure of an article on distributed training: `fit`, a custom loop, mixed precision, memory growth."""

import os

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"

keras.utils.set_random_seed(1)
strategy = distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")
BATCH_SIZE_PER_REPLICA = 16


def get_model():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10)])


with strategy.scope():
    model = get_model()
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

(x_train, y_train), _ = digits()
dataset = tf.data.Dataset.from_tensor_slices((x_train.reshape(-1, 64) / 16, y_train))
batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
dataset = dataset.shuffle(buffer_size=10000, seed=1).batch(batch_size).cache().prefetch(2)
history = model.fit(dataset, epochs=2).history

with strategy.scope():
    model = get_model()
    optimizer = keras.optimizers.Adam()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


@tf.function
def train_step(inputs):
    x, y = inputs
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = loss_object(y, predictions) / batch_size
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(distribute.ReduceOp.SUM, per_replica_losses, axis=None)


losses = [distributed_train_step(batch) for batch in strategy.experimental_distribute_dataset(dataset)]
weights = model.get_weights()

# Mixed precision.
keras.mixed_precision.set_global_policy(keras.mixed_precision.DTypePolicy("mixed_float16"))
with strategy.scope():
    model = get_model()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
mixed = model.fit(dataset, epochs=1).history["loss"]
assert mixed[0] < 2.5
report(loss=history["loss"], accuracy=history["accuracy"], losses=losses, weights=weights)
