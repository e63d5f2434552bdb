"""The program of Keras's guide to distributed training: a dense network on MNIST, a checkpoint for each epoch, resume.

    phalanx run --workers 2 examples/mnist_guide.py
    phalanx run --workers 2 examples/mnist_guide.py --epochs 4    # continues after the last checkpoint

Two things differ from the guide (https://keras.io/guides/distributed_training_with_tensorflow/): the import, and each
replica is a process, so the program also runs on several machines, and on JAX and PyTorch. The input is a
`tf.data.Dataset` if TensorFlow is installed, on every backend, and arrays otherwise. MNIST comes from Keras's cache or
from the network; without either, the program uses scikit-learn's digits, scaled up, and says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import socket
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx

DOWNLOAD_TIMEOUT_S = 10
Arrays = tuple[np.ndarray, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2, help="total epochs of all runs")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step, over all replicas")
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/mnist_guide"), help="folder")
    parser.add_argument("--samples", type=int, help="use only this many training images")
    parser.add_argument("--verbose", type=int, default=2, help="as in model.fit")
    options = parser.parse_args()

    strategy = phalanx.MultiWorkerMirroredStrategy()
    say = print if strategy.is_chief else lambda *_: None
    train, test = load_data(strategy, say)
    train = tuple(array[: options.samples] for array in train)
    # Only these lines know of replicas. The model is built inside the scope, also when it is read from a checkpoint.
    with strategy.scope():
        model, epochs_done = make_or_restore_model(options.checkpoints, say)

    options.checkpoints.mkdir(parents=True, exist_ok=True)
    validation = len(train[0]) // 6
    model.fit(
        batches(train[0][:-validation], train[1][:-validation], options.batch_size, shuffle=True),
        validation_data=batches(train[0][-validation:], train[1][-validation:], options.batch_size),
        epochs=options.epochs,
        initial_epoch=epochs_done,
        callbacks=[keras.callbacks.ModelCheckpoint(options.checkpoints / "epoch-{epoch:03d}.keras")],
        verbose=options.verbose,
    )
    loss, accuracy = model.evaluate(batches(*test, options.batch_size), verbose=0)
    say(f"test loss {loss:.4f}")
    say(f"test accuracy {accuracy:.2%}")


def make_or_restore_model(folder: Path, say: Any) -> tuple[keras.Model, int]:
    """The model of the newest checkpoint and its epoch; a new model and 0 where there is none."""
    found = {int(re.findall(r"\d+", path.stem)[0]): path for path in folder.glob("epoch-*.keras")}
    if found:
        epoch = max(found)
        say(f"restoring {found[epoch]}")
        return keras.models.load_model(found[epoch]), epoch
    return make_compiled_model(), 0


def make_compiled_model() -> keras.Model:
    inputs = keras.Input(shape=(784,))
    x = keras.layers.Dense(256, activation="relu")(inputs)
    x = keras.layers.Dense(256, activation="relu")(x)
    outputs = keras.layers.Dense(10)(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def batches(x: np.ndarray, y: np.ndarray, batch_size: int, *, shuffle: bool = False) -> Any:
    """Global batches for `fit`: every replica makes the same ones and takes its part."""
    if importlib.util.find_spec("tensorflow") is None:
        return ArrayBatches(x, y, batch_size, shuffle=shuffle)
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    if shuffle:
        dataset = dataset.shuffle(len(x), seed=1)
    return dataset.batch(batch_size)


class ArrayBatches(keras.utils.PyDataset):
    """What `tf.data` does above, for arrays in memory."""

    def __init__(self, x: np.ndarray, y: np.ndarray, batch_size: int, *, shuffle: bool):
        super().__init__()
        self._x, self._y, self._batch_size = x, y, batch_size
        self._random = np.random.default_rng(seed=1) if shuffle else None
        self._order = np.arange(len(x))
        self.on_epoch_end()

    def __len__(self) -> int:
        return -(-len(self._x) // self._batch_size)

    def __getitem__(self, index: int) -> Arrays:
        rows = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        return self._x[rows], self._y[rows]

    def on_epoch_end(self) -> None:
        if self._random is not None:
            self._order = self._random.permutation(len(self._x))


def load_data(strategy: phalanx.Strategy, say: Any) -> tuple[Arrays, Arrays]:
    """Training and test images as rows of 784 values from 0 to 1, and their digits: the same on every replica."""
    # The chief first, so that the replicas of one host do not all write the same file of the cache.
    data = fetch_mnist() if strategy.is_chief else None
    if on_all(strategy, data is not None or not strategy.is_chief):
        data = data or fetch_mnist()
        if on_all(strategy, data is not None):
            say("data: MNIST")
            return data
    say("data: scikit-learn's digits, scaled up, since MNIST is not cached and could not be fetched")
    return scaled_digits()


def on_all(strategy: phalanx.Strategy, flag: bool) -> bool:
    """Whether the flag is true on every replica; also a point where they wait for each other."""
    return bool(strategy.reduce("MIN", np.array(int(flag))))


def fetch_mnist() -> tuple[Arrays, Arrays] | None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
    try:
        train, test = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises a plain Exception where a download fails
        print(f"MNIST: {error}")
        return None
    finally:
        socket.setdefaulttimeout(before)
    return prepared(*train), prepared(*test)


def scaled_digits() -> tuple[Arrays, Arrays]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(x))
    images = x[order].reshape(-1, 8, 8) * (255 / 16)
    images = np.pad(images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    images, y = prepared(images, y[order])
    return (images[:1500], y[:1500]), (images[1500:], y[1500:])


def prepared(images: np.ndarray, digits: np.ndarray) -> Arrays:
    return images.reshape(-1, 784).astype("float32") / 255, digits.astype("int32")


if __name__ == "__main__":
    main()
