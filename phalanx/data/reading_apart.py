"""What each rank reads for itself: what the program calls meanwhile, the other ranks may not call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# The kinds of data that this process reads apart right now, the innermost last. Without a lock: data is read in the
# thread that trains (`ShardedInput._read`), which also asks.
_running: list[str] = []


@contextmanager
def reading_apart(kind: str) -> Iterator[None]:
    """While inside, `data_read_apart` returns this kind."""
    _running.append(kind)
    try:
        yield
    finally:
        _running.pop()


def data_read_apart() -> str | None:
    """The kind of the data that this rank reads now, unlike other ranks; None if it reads no such data."""
    return _running[-1] if _running else None
