"""What `phalanx plan` examines: a program whose `fit` would write files, and which would go on after it.

python program.py FOLDER [--batch-per-replica] [--no-fit]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx


class Written(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        (Path(sys.argv[1]) / "a callback ran").touch()


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = phalanx.MultiWorkerMirroredStrategy()
    batch = 12 * (strategy.num_replicas_in_sync if "--batch-per-replica" in sys.argv else 1)
    print("replicas:", strategy.num_replicas_in_sync)
    x = np.random.default_rng(0).normal(size=(96, 20)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(600), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    if "--no-fit" not in sys.argv:
        backup = keras.callbacks.ModelCheckpoint(folder / "model.keras")
        model.fit(x, x[:, :1], batch_size=batch, epochs=1, validation_split=0.5, callbacks=[Written(), backup])
        (folder / "went on").touch()


if __name__ == "__main__":
    main()
