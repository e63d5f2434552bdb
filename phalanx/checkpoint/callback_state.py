"""What the callbacks of a `fit` know, for one that goes on where it stood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import msgspec

from phalanx.training.callback_list import flat, remember, remembered


def callbacks_with_state(callbacks: Any) -> list[tuple[str, bytes]]:
    """For each callback its class, and what it remembers."""
    return [(type(callback).__name__, remembered(callback)) for callback in flat(callbacks)]


class CallbackStates:
    """What callbacks have learnt since this was made. What has once been another than then is told from there on, also
    where it is the same again."""

    def __init__(self, callbacks: Any) -> None:
        self._then = callbacks_with_state(callbacks)
        self._changed: list[set[str]] = [set() for _ in self._then]

    def of(self, callbacks: Any) -> list[tuple[str, bytes]]:
        """For each callback its class, and what it has learnt."""
        told = []
        for (name, now), (_, then), changed in zip(
            callbacks_with_state(callbacks), self._then, self._changed, strict=False
        ):
            after, before = msgspec.msgpack.decode(now), msgspec.msgpack.decode(then)
            changed |= {key for key, value in after.items() if key not in before or before[key] != value}
            told.append((name, msgspec.msgpack.encode({key: after[key] for key in changed if key in after})))
        return told


def remember_all(callbacks: Any, callbacks_with_state: Sequence[tuple[str, bytes]]) -> None:
    """Give callbacks what others of the same classes, in the same order, remembered."""
    for callback, (name, memory) in zip(flat(callbacks), callbacks_with_state, strict=False):
        if type(callback).__name__ == name:
            remember(callback, memory)


def append_to_files(callbacks: Any) -> None:
    """Before training goes on: what callbacks have written is not to be overwritten."""
    for callback in flat(callbacks):
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
