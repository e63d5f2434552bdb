"""Saves a model between two batches of `fit`, and compares it with that of plain Keras.

saving_program.py [--asynchronous]
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np

import phalanx

SYNCHRONOUS = "--asynchronous" not in sys.argv
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")


def compiled() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def state(path: Path) -> tuple[int, list[Any]]:
    """The optimizer's count of steps in a file, and all values."""
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    variables = [*model.variables, *model.optimizer.variables]
    return int(model.optimizer.iterations), [keras.ops.convert_to_numpy(variable) for variable in variables]


class Save(keras.callbacks.Callback):
    def __init__(self, folder: str, step: Any) -> None:
        super().__init__()
        self.path, self._step = Path(folder) / "model.weights.h5", step
        self.saved: list[tuple[int, list[Any]]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch in (1, 4):
            self.model.save_weights(self.path)
            iterations, values = state(self.path)
            assert iterations == self._step(self.model), "the count belongs to the weights"
            self.saved.append((iterations, values))


strategy = phalanx.ParameterServerStrategy(synchronous=SYNCHRONOUS)
with strategy.scope():
    model = compiled()
with TemporaryDirectory() as folder:
    save = Save(folder, lambda model: strategy.global_step)
    model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[save] * strategy.is_chief)
    if strategy.is_chief and SYNCHRONOUS:
        plain, expected = compiled(), Save(folder, lambda model: int(model.optimizer.iterations))
        plain.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[expected])
        for (steps, values), (plain_steps, plain_values) in zip(save.saved, expected.saved, strict=True):
            assert steps == plain_steps
            for value, other in zip(values, plain_values, strict=True):
                np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-6)
print("saved", len(save.saved), "times")
