"""Results of `fit` and `predict` as bytes, for processes that join a job when these calls are over."""

from __future__ import annotations

from typing import Any

import keras
from keras import tree

from phalanx.transport.serialization import decode, encode, is_serializable


def encode_history(history: Any) -> bytes:
    params = {name: value for name, value in (history.params or {}).items() if is_serializable(value)}
    return encode([list(history.epoch), history.history, params])


def decode_history(content: bytes, model: Any) -> Any:
    """The `History`, which also becomes the model's."""
    history = keras.callbacks.History()
    history.set_model(model)
    history.epoch, history.history, params = decode(content)
    history.set_params(params)
    model.history = history
    return history


def encode_outputs(outputs: Any) -> bytes:
    return encode(tree.flatten(outputs))


def decode_outputs(content: bytes, model: Any) -> Any:
    """The outputs in the structure that the model gives them."""
    arrays = decode(content)
    return arrays[0] if len(arrays) == 1 else tree.pack_sequence_as(model.output, arrays)
