"""Predictions and targets that distinguish losses that agree on the original samples of a batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from phalanx.keras_compat.keras_internals import get_keras_mask, set_keras_mask
from phalanx.training.checks.trial_samples import scaled

Array = np.ndarray[Any, Any]


def smaller_copies(array: Array, size: int) -> Array:
    """Slightly change the samples after the first `size`, which are copies of these."""
    if array.dtype.kind != "f":
        return array
    return scaled(array, 1.0 - 0.1 * (np.arange(len(array)) // size))


def spread_outputs(outputs: Any, rows: int) -> Any:
    """Repeat the outputs, each row smaller than the one before, so that probabilities stay probabilities."""
    chosen = np.resize(np.arange(outputs.shape[0]), rows)
    spread = ops.take(outputs, chosen, axis=0)
    if keras.backend.is_float_dtype(outputs.dtype):
        factors = np.linspace(1.0, 0.7, rows).reshape(-1, *[1] * (len(outputs.shape) - 1))
        spread = spread * ops.convert_to_tensor(factors, outputs.dtype)
    if (mask := get_keras_mask(outputs)) is not None:
        set_keras_mask(spread, ops.take(mask, chosen, axis=0))
    return spread


def with_zeros(values: Any, rows: slice, step: int) -> Any:
    """Set every `step`-th value in these rows to zero."""
    array = np.array(ops.convert_to_numpy(values))
    chosen = array[rows].reshape(-1)
    chosen[::step] = np.zeros((), array.dtype)
    array[rows] = chosen.reshape(array[rows].shape)
    return ops.convert_to_tensor(array)


def with_largest(values: Any, starts: tuple[int, ...]) -> Any:
    """Set some rows of each part to the largest value; or to one if all values are zero."""
    array = np.array(ops.convert_to_numpy(values))
    if array.dtype.kind not in "fiub":
        return values
    largest = array.max()
    for start in starts:
        array[start] = largest if largest else np.ones((), array.dtype)
    return ops.convert_to_tensor(array)


def with_reflected_rows(values: Any) -> Any:
    """Reflect every third row, so that the largest values become the smallest: half of the first part's rows, and a
    quarter of the other's."""
    array = np.array(ops.convert_to_numpy(values))
    if array.dtype.kind not in "fiu":
        return values
    array[::3] = array.max() + array.min() - array[::3]
    return ops.convert_to_tensor(array)
