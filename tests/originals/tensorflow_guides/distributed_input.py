"""To the structure of TensorFlow's tutorial "Distributed Input"."""

import keras
import numpy as np
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

keras.utils.set_random_seed(1)
mirrored_strategy = distribute.MirroredStrategy()
num_replicas = mirrored_strategy.num_replicas_in_sync
BATCH_SIZE_PER_REPLICA = 16
global_batch_size = BATCH_SIZE_PER_REPLICA * num_replicas
(images, labels), _ = digits()
images = images.reshape(-1, 64) / 16


def total_of(values):
    return mirrored_strategy.reduce(distribute.ReduceOp.SUM, values, axis=None)


# A dataset of global batches, in a loop of a tf.function over it.
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
print(dist_dataset.element_spec)


@tf.function
def train_step(inputs):
    features, labels = inputs
    return tf.reduce_sum(labels - 0.3 * features)


summed = [total_of(mirrored_strategy.run(train_step, args=(inputs,))) for inputs in dist_dataset]

# Its options.
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
digits_dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(global_batch_size).with_options(options)


# A dataset for each input pipeline.
def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size).prefetch(2)


with mirrored_strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.1)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def replica_step(inputs):
    x, y = inputs
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss(loss_object(y, model(x)), global_batch_size=global_batch_size)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


# An iterator that a tf.function gets, for a number of steps.
@tf.function
def steps_with_iterator(iterator, steps):
    total = 0.0
    for _ in tf.range(steps):
        per_replica = mirrored_strategy.run(replica_step, args=(next(iterator),))
        total += mirrored_strategy.reduce(distribute.ReduceOp.SUM, per_replica, axis=None)
    return total


dist_digits = mirrored_strategy.experimental_distribute_dataset(digits_dataset)
losses = [steps_with_iterator(iter(dist_digits), tf.constant(5)) for _ in range(2)]
assert steps_with_iterator.experimental_get_tracing_count() == 1


# To the end of the data, which only the iterator knows.
@tf.function
def until_the_end(iterator):
    total = tf.constant(0.0)
    optional_data = iterator.get_next_as_optional()
    while optional_data.has_value():
        per_replica = mirrored_strategy.run(replica_step, args=(optional_data.get_value(),))
        total += mirrored_strategy.reduce(distribute.ReduceOp.SUM, per_replica, axis=None)
        optional_data = iterator.get_next_as_optional()
    return total


losses.append(until_the_end(iter(dist_digits)))


@tf.function
def over_the_iterator(iterator):
    total = tf.constant(0.0)
    for inputs in iterator:
        per_replica = mirrored_strategy.run(replica_step, args=(inputs,))
        total += mirrored_strategy.reduce(distribute.ReduceOp.SUM, per_replica, axis=None)
    return total


losses.append(over_the_iterator(iter(dist_digits)))

# The end of the data is an error of an iterator in a tf.function.
ended_iterator = iter(dist_digits)
steps = 0
try:
    while True:
        steps_with_iterator(ended_iterator, tf.constant(1))
        steps += 1
except tf.errors.OutOfRangeError:
    print("ended after", steps)

own_dataset = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
own = [0, 0]
for x, _ in own_dataset:
    own = [own[0] + total_of(tf.constant(len(x))), own[1] + total_of(tf.reduce_sum(x))]


# One dataset for each worker from a generator.
def data_generator():
    yield from np.arange(12, dtype="float32").reshape(12, 1)


generated = tf.data.Dataset.from_generator(
    data_generator, output_signature=tf.TensorSpec(shape=(1,), dtype=tf.float32)
).batch(4)
from_generator = [
    mirrored_strategy.gather(batch, axis=0) for batch in mirrored_strategy.experimental_distribute_dataset(generated)
]


# Values for each replica from a function.
def value_fn(ctx):
    return tf.constant(ctx.replica_id_in_sync_group)


distributed_values = mirrored_strategy.experimental_distribute_values_from_function(value_fn)
result = mirrored_strategy.run(lambda value: value * value, args=(distributed_values,))
assert int(total_of(result)) == sum(number**2 for number in range(num_replicas))

report(summed=summed, losses=losses, steps=steps, own=own, from_generator=from_generator, weights=model.get_weights())
