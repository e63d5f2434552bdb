"""To the structure of Horovod's examples/elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py."""

import keras
import tensorflow as tf

import phalanx.horovod.tensorflow.keras as hvd  # was: import horovod.tensorflow.keras as hvd
from tests.originals.report import digits, report

hvd.init()
(mnist_images, mnist_labels), _ = digits()
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(mnist_images[..., tf.newaxis] / 16.0, tf.float32), tf.cast(mnist_labels, tf.int64))
)
dataset = dataset.repeat().shuffle(1000).batch(32)

model = keras.Sequential(
    [
        keras.layers.Conv2D(8, [3, 3], activation="relu"),
        keras.layers.MaxPooling2D(pool_size=(2, 2)),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_lr = 0.001 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None)

state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset():
    state.model.optimizer.learning_rate = 0.001 * hvd.size()
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None)


state.register_reset_callbacks([on_state_reset])
callbacks = [
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))


@hvd.elastic.run
def train(state):
    state.model.fit(dataset, steps_per_epoch=20 // hvd.size(), epochs=3 - state.epoch, callbacks=callbacks, verbose=1)


train(state)
report(weights=model.get_weights())
