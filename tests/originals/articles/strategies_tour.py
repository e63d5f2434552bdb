"""To the structure of an article on TensorFlow's strategies: MobileNetV2, then the multi-worker strategy."""

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

num_epochs = 1
batch_size_per_replica = 8
learning_rate = 0.001
keras.utils.set_random_seed(1)

strategy = distribute.MirroredStrategy(cross_device_ops=distribute.HierarchicalCopyAllReduce)
print(f"Number of devices: {strategy.num_replicas_in_sync}")
batch_size = batch_size_per_replica * strategy.num_replicas_in_sync


def resize(image, label):
    image = tf.image.resize(image[..., None], [32, 32]) / 16.0
    return tf.repeat(image, 3, axis=-1), label % 2


(images, labels), _ = digits(64)
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.map(resize).shuffle(1024, seed=1).batch(batch_size)

with strategy.scope():
    model = keras.applications.MobileNetV2(weights=None, classes=2, input_shape=(32, 32, 3), alpha=0.35)
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=learning_rate),
        loss=keras.losses.sparse_categorical_crossentropy,
        metrics=[keras.metrics.sparse_categorical_accuracy],
    )
history = model.fit(dataset, epochs=num_epochs).history

# The same with several workers, by the name that the article uses.
strategy = distribute.experimental.MultiWorkerMirroredStrategy(
    communication=distribute.experimental.CollectiveCommunication.AUTO, cluster_resolver=None
)
with strategy.scope():
    model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(2, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
workers = model.fit(dataset, epochs=num_epochs).history
report(steps=len(history["loss"]), workers=workers["loss"], weights=model.get_weights())
