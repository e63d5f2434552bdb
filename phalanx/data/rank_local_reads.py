"""What each rank reads for itself.

What the program calls meanwhile, the other ranks may not call; what it draws meanwhile, they do not draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

# Without locks: data is read in the thread that trains (`ShardedInput._read`), which also asks.
_running: list[str] = []  # the kinds of data that only this rank reads right now, the innermost last
_streams: list[Callable[[], AbstractContextManager[None]]] = []  # of random numbers, the innermost last


@contextmanager
def reading_rank_local_data(kind: str) -> Iterator[None]:
    """While inside, `rank_local_data` returns this kind."""
    _running.append(kind)
    try:
        yield
    finally:
        _running.pop()


def rank_local_data() -> str | None:
    """The kind of the data that this rank reads now, unlike other ranks; None if it reads no such data."""
    return _running[-1] if _running else None


@contextmanager
def drawing_samples_from(stream: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While inside, `drawing_samples` returns what this makes."""
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


def drawing_samples() -> AbstractContextManager[None]:
    """A context in which samples that are this rank's alone draw random numbers."""
    return _streams[-1]() if _streams else nullcontext()
