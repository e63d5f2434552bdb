"""To the structure of TensorFlow's tutorial "Multi-worker training with Keras"."""

import json
import os

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

keras.utils.set_random_seed(1)


def mnist_dataset(batch_size):
    (x_train, y_train), _ = digits()
    train_dataset = tf.data.Dataset.from_tensor_slices((x_train / 16, y_train))
    return train_dataset.shuffle(480, seed=1).repeat().batch(batch_size)


def build_and_compile_cnn_model():
    model = keras.Sequential(
        [
            keras.layers.InputLayer(shape=(8, 8)),
            keras.layers.Reshape(target_shape=(8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.01),
        metrics=["accuracy"],
    )
    return model


per_worker_batch_size = 16
tf_config = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": ["localhost:0"]}}'))
num_workers = len(tf_config["cluster"]["worker"])
strategy = distribute.MultiWorkerMirroredStrategy()
global_batch_size = per_worker_batch_size * num_workers
multi_worker_dataset = mnist_dataset(global_batch_size)

# Each worker cuts the dataset by elements.
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
multi_worker_dataset = multi_worker_dataset.with_options(options)

with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()

callbacks = [keras.callbacks.BackupAndRestore(backup_dir="backup")]
history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=10, callbacks=callbacks).history

# Every worker saves; all but the chief to a folder that is thrown away.
model_path = os.path.join(os.getcwd(), "keras-model.keras")


def _is_chief(task_type, task_id):
    return (task_type == "worker" and task_id == 0) or task_type is None


def _get_temp_dir(dirpath, task_id):
    temp_dir = os.path.join(dirpath, "workertemp_" + str(task_id))
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
write_model_path = write_filepath(model_path, task_type, task_id)
multi_worker_model.save(write_model_path)
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))
if _is_chief(task_type, task_id):
    loaded_model = keras.models.load_model(model_path)
    assert all(
        (one == other).all()
        for one, other in zip(loaded_model.get_weights(), multi_worker_model.get_weights(), strict=True)
    )

# The same with a checkpoint of TensorFlow's.
checkpoint_dir = os.path.join(os.getcwd(), "ckpt")
checkpoint = tf.train.Checkpoint(model=multi_worker_model)
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id)
checkpoint_manager = tf.train.CheckpointManager(checkpoint, directory=write_checkpoint_dir, max_to_keep=1)
checkpoint_manager.save()
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(write_checkpoint_dir)
if _is_chief(task_type, task_id):
    latest_checkpoint = tf.train.latest_checkpoint(checkpoint_dir)
    checkpoint.restore(latest_checkpoint)
evaluated = multi_worker_model.evaluate(multi_worker_dataset, steps=5)

report(
    loss=history["loss"], accuracy=history["accuracy"], evaluated=evaluated, weights=multi_worker_model.get_weights()
)
