"""The values of variables and tensors as NumPy arrays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

Array = np.ndarray[Any, Any]


def to_host(variable: Any) -> Array:
    """The value of a variable or tensor; it may share the memory of a variable that is assigned later."""
    return np.asarray(keras.ops.convert_to_numpy(_value(variable)))


def host_copy(variable: Any) -> Array:
    """The value of a variable or tensor, which stays as it is whatever is assigned."""
    return np.array(keras.ops.convert_to_numpy(_value(variable)))


def _value(variable: Any) -> Any:
    value = getattr(variable, "value", variable)
    return value() if callable(value) else value  # a method, of a variable of TensorFlow
