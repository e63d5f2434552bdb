"""To the structure of TensorFlow's tutorial "Parameter server training", its part with `Model.fit`."""

import os

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

keras.utils.set_random_seed(1)
cluster_resolver = distribute.cluster_resolver.TFConfigClusterResolver()
if cluster_resolver.task_type in ("worker", "ps"):
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    server = distribute.Server(
        cluster_resolver.cluster_spec(),
        job_name=cluster_resolver.task_type,
        task_index=cluster_resolver.task_id,
        protocol=cluster_resolver.rpc_layer or "grpc",
        start=True,
    )
    server.join()

NUM_PS = 1
variable_partitioner = distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(256 << 10), max_shards=NUM_PS
)
strategy = distribute.ParameterServerStrategy(cluster_resolver, variable_partitioner=variable_partitioner)

global_batch_size = 32
(x, y), (test_x, test_y) = digits()
dataset = tf.data.Dataset.from_tensor_slices((x.reshape(-1, 64) / 16, y)).shuffle(480, seed=1).repeat()
dataset = dataset.batch(global_batch_size).prefetch(2)

with strategy.scope():
    model = keras.models.Sequential([keras.Input((64,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=10,
    )

callbacks = [
    keras.callbacks.TensorBoard(log_dir="my_working_dir/log"),
    keras.callbacks.ModelCheckpoint(filepath="my_working_dir/ckpt.weights.h5", save_weights_only=True),
    keras.callbacks.BackupAndRestore(backup_dir="my_working_dir/backup"),
]
history = model.fit(dataset, epochs=10, steps_per_epoch=40, callbacks=callbacks).history
_, accuracy = model.evaluate(test_x.reshape(-1, 64) / 16, test_y)
assert accuracy > 0.7, accuracy
report(epochs=len(history["loss"]))
