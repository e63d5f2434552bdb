"""Arguments of Keras's `fit`, which all trainers share."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import keras

from phalanx.keras_compat.keras_internals import train_validation_split


@dataclass
class FitArguments:
    """Arguments of `keras.Model.fit`, with its names and defaults.

    `epochs` and `steps_per_epoch` are capped by `keras.config`; `validation_split` is replaced by `validation_data`.
    The fields match the arguments of Keras's method exactly: each of them is a promise of `fit`.
    """

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: Any = True
    class_weight: Any = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1

    def __post_init__(self) -> None:
        self.epochs = self.epochs and capped(self.epochs, keras.config.max_epochs(), "epochs")  # 0: no epoch
        self.steps_per_epoch = capped(self.steps_per_epoch, keras.config.max_steps_per_epoch(), "steps_per_epoch")
        if self.validation_split and self.validation_data is None:
            (self.x, self.y, self.sample_weight), self.validation_data = train_validation_split(
                (self.x, self.y, self.sample_weight), validation_split=self.validation_split
            )


def capped(value: Any, cap: int | None, name: str) -> Any:
    """Return the smaller of the value and the cap of `keras.config`, and warn if capped; no value is unlimited."""
    if cap and (not value or cap < value):
        warnings.warn(f"Limiting {name} to {cap}", stacklevel=3)
        return cap
    return value
