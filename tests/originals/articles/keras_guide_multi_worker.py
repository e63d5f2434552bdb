"""To the structure of the last part of Keras's guide: workers and an evaluator with TF_CONFIG, one program for all."""

import os

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

keras.utils.set_random_seed(1)
(x_train, y_train), (x_test, y_test) = digits()
train_dataset = tf.data.Dataset.from_tensor_slices((x_train.reshape(-1, 64) / 16, y_train)).batch(32)
val_dataset = tf.data.Dataset.from_tensor_slices((x_test.reshape(-1, 64) / 16, y_test)).batch(32)


def make_or_restore_model():
    checkpoints = [os.path.join("ckpt", name) for name in os.listdir("ckpt")] if os.path.isdir("ckpt") else []
    if checkpoints:
        return keras.models.load_model(max(checkpoints, key=os.path.getctime))
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["sparse_categorical_accuracy"]
    )
    return model


strategy = distribute.experimental.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = make_or_restore_model()
callbacks = [
    keras.callbacks.ModelCheckpoint(filepath="ckpt/ckpt.keras", save_freq=10),
    keras.callbacks.TensorBoard("tb"),
]
history = model.fit(train_dataset, epochs=2, callbacks=callbacks).history

# The evaluator's part.
strategy = distribute.MirroredStrategy()
with strategy.scope():
    restored = make_or_restore_model()
results = restored.evaluate(val_dataset)
report(loss=history["loss"], results=results, weights=model.get_weights())
