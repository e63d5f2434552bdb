"""To the structure of Horovod's examples/keras/keras_mnist_advanced.py, and of its TensorFlow 2 sibling."""

import argparse

import keras
import tensorflow as tf

import phalanx.horovod.tensorflow.keras as hvd  # was: import horovod.tensorflow.keras as hvd
from tests.originals.report import digits, report

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.001)
args = parser.parse_args()

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

(mnist_images, mnist_labels), (x_test, y_test) = digits()
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(mnist_images[..., tf.newaxis] / 16.0, tf.float32), tf.cast(mnist_labels, tf.int64))
)
dataset = dataset.repeat().shuffle(10000).batch(args.batch_size)

mnist_model = keras.Sequential(
    [
        keras.layers.Conv2D(8, [3, 3], activation="relu"),
        keras.layers.MaxPooling2D(pool_size=(2, 2)),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_lr = args.lr * hvd.size()
opt = keras.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
mnist_model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=10, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))
verbose = 1 if hvd.rank() == 0 else 0

history = mnist_model.fit(
    dataset, steps_per_epoch=20 // hvd.size(), callbacks=callbacks, epochs=args.epochs, verbose=verbose
).history
score = mnist_model.evaluate(x_test[..., None] / 16, y_test, verbose=0)
report(loss=history["loss"], score=score, weights=mnist_model.get_weights())
