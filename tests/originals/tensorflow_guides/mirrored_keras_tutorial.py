"""To the structure of TensorFlow's tutorial "Distributed training with Keras"."""

import os

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

keras.utils.set_random_seed(1)
(train_images, train_labels), (test_images, test_labels) = digits()

strategy = distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

BUFFER_SIZE = 1000
BATCH_SIZE_PER_REPLICA = 16
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def scale(image, label):
    return tf.cast(image, tf.float32)[..., None] / 16, label


mnist_train = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
mnist_test = tf.data.Dataset.from_tensor_slices((test_images, test_labels))
train_dataset = mnist_train.map(scale).cache().shuffle(BUFFER_SIZE, seed=1).batch(BATCH_SIZE)
eval_dataset = mnist_test.map(scale).batch(BATCH_SIZE)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, activation="relu", input_shape=(8, 8, 1)),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(learning_rate=0.001),
        metrics=["accuracy"],
    )

checkpoint_dir = "./training_checkpoints"
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch:02d}.weights.h5")


def decay(epoch):
    if epoch < 1:
        return 1e-2
    if epoch < 2:
        return 1e-3
    return 1e-4


class PrintLR(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"\nLearning rate for epoch {epoch + 1} is {float(self.model.optimizer.learning_rate)}")


callbacks = [
    keras.callbacks.TensorBoard(log_dir="./logs"),
    keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]
EPOCHS = 3
history = model.fit(train_dataset, epochs=EPOCHS, callbacks=callbacks).history

latest = os.path.join(checkpoint_dir, max(os.listdir(checkpoint_dir)))
model.load_weights(latest)
eval_loss, eval_acc = model.evaluate(eval_dataset)
print(f"Eval loss: {eval_loss}, Eval accuracy: {eval_acc}")

path = "my_model.keras"
model.save(path)

unreplicated_model = keras.models.load_model(path)
unreplicated_model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.Adam(),
    metrics=["accuracy"],
)
alone = unreplicated_model.evaluate(eval_dataset)

with strategy.scope():
    replicated_model = keras.models.load_model(path)
    replicated_model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(),
        metrics=["accuracy"],
    )
    together = replicated_model.evaluate(eval_dataset)

report(
    loss=history["loss"],
    accuracy=history["accuracy"],
    evaluated=[eval_loss, eval_acc],
    alone=alone,
    together=together,
    weights=model.get_weights(),
)
