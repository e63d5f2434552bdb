"""State that a `fit` leaves to the program in addition to its history, for processes that join later.

Those processes have not run the `fit`. What the program does before its next call may depend on the state of callbacks
(`stopping.best_epoch`), on the optimizer, or on the weights (targets computed by `model(x)`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from phalanx.checkpoint.callback_state import restore_states
from phalanx.keras_compat.variables.host_values import to_host
from phalanx.training.checks.same_model import structure_of
from phalanx.training.state_sync import variables_of
from phalanx.transport.serialization import decode, encode

MAX_STATE_BYTES = 2**26
"""Maximum size of a state, which is kept in the launcher's memory."""
LARGE_BYTES = 2**20
"""Maximum size of a callback attribute in it: anything larger is weights, such as the best ones."""


def encode_finished_fit(model: Any, callbacks: Sequence[tuple[str, bytes]]) -> bytes:
    """Encode the state of callbacks and model after a `fit`, without a model or callback attributes too large to keep.

    Args:
        callbacks: Result of `CallbackStateTracker.changes`.
    """
    states = [(name, _without_large(content)) for name, content in callbacks]
    variables = variables_of(model)
    structure = structure_of(variables, with_paths=False)
    needed = sum(_nbytes(shape, dtype) for _, shape, dtype in structure) + sum(len(each) for _, each in states)
    values = [to_host(variable) for variable in variables] if needed < MAX_STATE_BYTES else None
    return encode([states, structure, values])


def _without_large(content: bytes) -> bytes:
    """Return the state of one callback, without weights that it keeps."""
    if len(content) <= LARGE_BYTES:
        return content
    return encode({name: value for name, value in decode(content).items() if len(encode(value)) <= LARGE_BYTES})


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * int(np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize)


def adopt_finished_fit(content: bytes, model: Any, callbacks: Any) -> bool:
    """Set the callbacks and the model to the state that the members have after a `fit`.

    Args:
        content: Result of `encode_finished_fit`; empty if it was not kept.

    Returns: whether the model has it; not if it is unbuilt or has another structure, which its next call reports.
    """
    if not content:
        return False
    states, structure, values = decode(content)
    restore_states(callbacks, states)
    if values is None or not model.built:
        return False
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables = variables_of(model)
    if structure_of(variables, with_paths=False) != structure:
        return False
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return True
