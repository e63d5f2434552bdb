"""Trains on digits until it is stopped, and logs the time of each step: `recovery_program.py FOLDER`."""

from __future__ import annotations

import os
import sys
import time

import keras
from sklearn.datasets import load_digits

import phalanx


class Times(keras.callbacks.Callback):
    """Writes one line per step."""

    def __init__(self, folder: str):
        super().__init__()
        self._file = open(os.path.join(folder, f"{os.getpid()}.log"), "a", buffering=1)  # noqa: SIM115

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._file.write(f"{time.time()}\n")


def main() -> None:
    strategy = phalanx.MultiWorkerMirroredStrategy()
    images, labels = load_digits(return_X_y=True)
    x, y = (images / 16).reshape(-1, 8, 8, 1).astype("float32"), labels
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=10_000, callbacks=[Times(sys.argv[1])], verbose=0)


if __name__ == "__main__":
    main()
