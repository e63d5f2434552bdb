"""The values of variables and tensors as NumPy arrays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

Array = np.ndarray[Any, Any]


def to_host(variable: Any) -> Array:
    """Return the value of a variable or tensor. It may share the memory of a variable that is assigned later."""
    return np.asarray(keras.ops.convert_to_numpy(_value(variable)))


def host_copy(variable: Any) -> Array:
    """Return the value of a variable or tensor as a copy, which later assignments do not change."""
    return np.array(keras.ops.convert_to_numpy(_value(variable)))


def _value(variable: Any) -> Any:
    value = getattr(variable, "value", variable)
    return value() if callable(value) else value  # a method in TensorFlow's variables
