"""Marks reads of data that only this rank reads.

During such a read, the program may make calls and draw random numbers that the other ranks do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

# Without locks: the thread that trains reads data (`ShardedInput._read`), and also calls `rank_local_data`.
_running: list[str] = []  # the kinds of data that only this rank is reading, the innermost last
_streams: list[Callable[[], AbstractContextManager[None]]] = []  # of random numbers, the innermost last


@contextmanager
def reading_rank_local_data(kind: str) -> Iterator[None]:
    """Context in which `rank_local_data` returns this kind."""
    _running.append(kind)
    try:
        yield
    finally:
        _running.pop()


def rank_local_data() -> str | None:
    """The kind of data that only this rank is currently reading; None if it reads no such data."""
    return _running[-1] if _running else None


@contextmanager
def drawing_samples_from(stream: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context in which `drawing_samples` returns the contexts that `stream` creates."""
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


def drawing_samples() -> AbstractContextManager[None]:
    """Context for loading samples of this rank alone, which may draw random numbers."""
    return _streams[-1]() if _streams else nullcontext()
