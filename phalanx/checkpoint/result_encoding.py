"""Encodes results of `fit` and `predict` as bytes, for processes that join a job after these calls."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import tree

from phalanx.runtime.exit_codes import sendable
from phalanx.transport.serialization import decode, encode, is_serializable


def as_plain_value(value: Any) -> Any:
    """A log value that can be encoded: itself, a tensor's array, or text if no other process could have it."""
    if is_serializable(value):
        return value
    if keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        return np.array(keras.ops.convert_to_numpy(value))
    if isinstance(value, list | tuple):
        return [as_plain_value(each) for each in value]
    return sendable(repr(value))


def plain_history(history: Any) -> dict[str, list[Any]]:
    """The records of a `History`, as values that can be encoded."""
    return {name: [as_plain_value(value) for value in values] for name, values in history.history.items()}


def encode_history(history: Any) -> bytes:
    params = {name: value for name, value in (history.params or {}).items() if is_serializable(value)}
    return encode([list(history.epoch), plain_history(history), params])


def decode_history(content: bytes, model: Any) -> Any:
    """The `History`, which also becomes the model's history."""
    history = keras.callbacks.History()
    history.set_model(model)
    history.epoch, history.history, params = decode(content)
    history.set_params(params)
    model.history = history
    return history


def encode_outputs(outputs: Any) -> bytes:
    return encode(tree.flatten(outputs))


def decode_outputs(content: bytes, model: Any) -> Any:
    """The outputs in the model's output structure."""
    arrays = decode(content)
    return arrays[0] if len(arrays) == 1 else tree.pack_sequence_as(model.output, arrays)
