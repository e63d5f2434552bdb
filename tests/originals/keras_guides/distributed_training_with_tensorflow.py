"""To the structure of Keras's guide "Multi-GPU distributed training with TensorFlow"."""

import os

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report


def get_compiled_model():
    inputs = keras.Input(shape=(64,))
    x = keras.layers.Dense(16, activation="relu")(inputs)
    x = keras.layers.Dense(16, activation="relu")(x)
    outputs = keras.layers.Dense(10)(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def get_dataset():
    batch_size = 32
    num_val_samples = 100
    (x_train, y_train), (x_test, y_test) = digits()
    x_train = x_train.reshape(-1, 64).astype("float32") / 16
    x_test = x_test.reshape(-1, 64).astype("float32") / 16
    y_train = y_train.astype("float32")
    y_test = y_test.astype("float32")
    x_val = x_train[-num_val_samples:]
    y_val = y_train[-num_val_samples:]
    x_train = x_train[:-num_val_samples]
    y_train = y_train[:-num_val_samples]
    return (
        tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(batch_size),
        tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(batch_size),
        tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(batch_size),
    )


keras.utils.set_random_seed(1)
strategy = distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")
with strategy.scope():
    model = get_compiled_model()
train_dataset, val_dataset, test_dataset = get_dataset()
first = model.fit(train_dataset, epochs=2, validation_data=val_dataset).history
tested = model.evaluate(test_dataset)

# Fault tolerance: a checkpoint at each epoch, from which a second call goes on.
checkpoint_dir = "./ckpt"
if not os.path.exists(checkpoint_dir):
    os.makedirs(checkpoint_dir, exist_ok=True)


def make_or_restore_model():
    checkpoints = [checkpoint_dir + "/" + name for name in os.listdir(checkpoint_dir)]
    if checkpoints:
        latest_checkpoint = max(checkpoints, key=os.path.getctime)
        print("Restoring from", latest_checkpoint)
        return keras.models.load_model(latest_checkpoint)
    print("Creating a new model")
    return get_compiled_model()


def run_training(epochs=1):
    strategy = distribute.MirroredStrategy()
    with strategy.scope():
        model = make_or_restore_model()
        callbacks = [
            keras.callbacks.ModelCheckpoint(filepath=checkpoint_dir + "/ckpt-{epoch}.keras", save_freq="epoch")
        ]
        history = model.fit(
            train_dataset, epochs=epochs, callbacks=callbacks, validation_data=val_dataset, verbose=2
        ).history
    return [history["loss"], history["val_loss"]], model


seen, _ = run_training(epochs=1)
again, model = run_training(epochs=1)

report(first=[first["loss"], first["val_loss"]], tested=tested, seen=seen, again=again, weights=model.get_weights())
