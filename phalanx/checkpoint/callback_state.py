"""State of callbacks (attributes with plain values), with which another process can continue a `fit`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import keras
import msgspec

from phalanx.keras_compat.callback_bases import flatten_callbacks
from phalanx.transport.decoding import decode_message
from phalanx.transport.serialization import decode, encode, is_serializable

# Set by Keras at the start of the method, or by the rank (`verbose` is 0 on all but the chief).
_NOT_STATE = ("params", "_params", "model", "_model", "progbar", "verbose")


class CallbackStateTracker:
    """Tracks which attributes of callbacks have changed since this was created.

    An attribute that has once changed is reported from then on, even if it has its initial value again.
    """

    def __init__(self, callbacks: Any) -> None:
        self._initial = [_state_of(callback) for callback in flatten_callbacks(callbacks)]
        self._changed: list[set[str]] = [set() for _ in self._initial]

    def changes(self, callbacks: Any) -> list[tuple[str, bytes]]:
        """The class of each callback, and its changed attributes, encoded."""
        found = []
        for callback, content, changed in zip(flatten_callbacks(callbacks), self._initial, self._changed, strict=False):
            # Compared in encoded form: the values themselves may be arrays, and may have been changed in place.
            now = decode_message(_state_of(callback))
            before = decode_message(content)
            changed |= {key for key, value in now.items() if key not in before or before[key] != value}
            learnt = msgspec.msgpack.encode({key: now[key] for key in changed if key in now})
            found.append((type(callback).__name__, learnt))
        return found


def restore_states(callbacks: Any, states: Sequence[tuple[str, bytes]]) -> None:
    """Restore what `CallbackStateTracker.changes` reported of callbacks of the same classes, in the same order."""
    for callback, (name, content) in zip(flatten_callbacks(callbacks), states, strict=False):
        # The program may have been edited since, or ranks pass others: position and class must match.
        if type(callback).__name__ != name:
            continue
        written: set[int] = set()
        for attribute, value in decode(content).items():
            current = vars(callback).get(attribute)
            # Two attributes may have begun as the same object.
            if id(current) in written or not _write_into(current, value):
                vars(callback)[attribute] = value
            else:
                written.add(id(current))
        if hasattr(callback, "min_delta") and getattr(callback, "monitor_op", True) is None:
            # At the end of its first epoch, Keras finds out which direction is better, and then flips this sign.
            callback.min_delta = abs(callback.min_delta)


def _write_into(current: Any, value: Any) -> bool:
    """Replace the contents of `current` by those of `value`, in place. Returns whether that was possible. The program
    may hold the object too, such as a list that it passed; a `Counter` or `defaultdict` would become a `dict`."""
    kind = next((each for each in (list, deque, dict, set) if isinstance(current, each)), None)
    if kind is None or not isinstance(value, kind):
        return False
    current.clear()
    (current.update if kind in (dict, set) else current.extend)(value)
    return True


def append_to_log_files(callbacks: Any) -> None:
    """Make callbacks append to the files that they have written, before training continues."""
    for callback in flatten_callbacks(callbacks):
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def _state_of(callback: Any) -> bytes:
    return encode(
        {name: value for name, value in vars(callback).items() if name not in _NOT_STATE and is_serializable(value)}
    )
