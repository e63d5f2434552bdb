"""What a `fit` leaves to the program besides its history, for processes that join an elastic job when it is over.

They have not run it. What the program does before its next call may depend on what callbacks have learnt
(`stopping.best_epoch`), on the optimizer, or on the weights (targets made by `model(x)`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np

from phalanx.checkpoint.callback_state import restore_states
from phalanx.engines import buffers
from phalanx.keras_compat.model_state import optimizers
from phalanx.keras_compat.variables.host_values import to_host
from phalanx.transport.serialization import decode, encode

MAX_STATE_BYTES = 2**26
"""What a state may take: it is in the launcher's memory."""
LARGE_BYTES = 2**20
"""What an attribute of a callback may take of it: more are weights, such as the best ones."""


def encode_finished_fit(model: Any, callbacks: Sequence[tuple[str, bytes]]) -> bytes:
    """The state of the callbacks and of the model after a `fit`; without the model's if that is too large, and without
    what is too large of a callback.

    Args:
        callbacks: from `CallbackStateTracker.changes`.
    """
    states = [(name, _without_large(content)) for name, content in callbacks]
    variables = _variables(model)
    needed = sum(_nbytes(variable) for part in variables for variable in part) + sum(len(each) for _, each in states)
    values = [[to_host(variable) for variable in part] for part in variables] if needed < MAX_STATE_BYTES else None
    return encode([states, values])


def _without_large(content: bytes) -> bytes:
    """What one callback has learnt, without weights that it keeps."""
    if len(content) <= LARGE_BYTES:
        return content
    return encode({name: value for name, value in decode(content).items() if len(encode(value)) <= LARGE_BYTES})


def _nbytes(variable: Any) -> int:
    name = keras.backend.standardize_dtype(variable.dtype)
    return int(math.prod(variable.shape) * np.dtype(getattr(ml_dtypes, name, name)).itemsize)


def adopt_finished_fit(content: bytes, model: Any, callbacks: Any) -> bool:
    """Give the callbacks and the model the state that the members have after a `fit`.

    Args:
        content: from `encode_finished_fit`; empty if it was not kept.

    Returns: whether the model has it. Not if it is not built yet or has another structure, which its next call reports.
    """
    if not content:
        return False
    states, values = decode(content)
    restore_states(callbacks, states)
    if values is None or not model.built:
        return False
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables = _variables(model)
    if [[_form(to_host(each)) for each in part] for part in variables] != [[*map(_form, part)] for part in values]:
        return False
    for own, theirs in zip(variables, values, strict=True):
        for variable, value in zip(own, theirs, strict=True):
            variable.assign(value)
    return True


def _variables(model: Any) -> list[list[Any]]:
    """The variables of the model, and those of each optimizer."""
    weights = [*model.trainable_variables, *model.non_trainable_variables, *buffers(model)]
    return [weights, *(list(optimizer.variables) for optimizer in optimizers(model))]


def _form(array: np.ndarray[Any, Any]) -> tuple[tuple[int, ...], str]:
    return array.shape, array.dtype.name
