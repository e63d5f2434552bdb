"""What the callbacks of a `fit` know, for one that goes on where it stood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import msgspec

from phalanx.training.callbacks import flat, remember, remembered


def memories(callbacks: Any, since: Sequence[tuple[str, bytes]] | None = None) -> list[tuple[str, bytes]]:
    """For each callback its class, and what it remembers.

    Args:
        since: an earlier answer: then only what has changed, so that what a program sets differently when it is started
            again stays as it sets it.
    """
    found = [(type(callback).__name__, remembered(callback)) for callback in flat(callbacks)]
    if since is None:
        return found
    return [(name, _changes(now, then)) for (name, now), (_, then) in zip(found, since, strict=True)]


def remember_all(callbacks: Any, memories: Sequence[tuple[str, bytes]]) -> None:
    """Give callbacks what others of the same classes, in the same order, remembered."""
    for callback, (name, memory) in zip(flat(callbacks), memories, strict=False):
        if type(callback).__name__ == name:
            remember(callback, memory)


def append_to_files(callbacks: Any) -> None:
    """Before training goes on: what callbacks have written is not to be overwritten."""
    for callback in flat(callbacks):
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def _changes(now: bytes, then: bytes) -> bytes:
    if now == then:
        return msgspec.msgpack.encode({})
    before = msgspec.msgpack.decode(then)
    after = msgspec.msgpack.decode(now)
    return msgspec.msgpack.encode({k: v for k, v in after.items() if k not in before or before[k] != v})
