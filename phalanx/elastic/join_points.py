"""Points in the program where others may join an elastic job: before collectives where all members are equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class JoinPoints:
    """The join points of one process, which are the same on all members.

    Attributes:
        at_boundary: Whether the next collective is the merge of a training step, before which others may join.
    """

    def __init__(self) -> None:
        self.at_boundary = False
        self._is_open = self._is_closed = self._was_closed = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow others to join before any collective in the block: the caller can return to a common state."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Prevent others from joining in the block, even inside `open`: a process that joins would not make this inner
        call."""
        before = self._is_open, self._is_closed  # already closed in a nested call: `predict` in a callback of `fit`
        self._is_open, self._is_closed = False, True
        try:
            yield
        finally:
            self._is_open, self._is_closed = before
            self._was_closed = True

    def was_closed(self) -> bool:
        """Return whether there was a `closed` section since the last call; if so, others may be waiting to join."""
        was_closed, self._was_closed = self._was_closed, False
        return was_closed

    def next_collective(self) -> bool:
        """Return whether others may join before the collective that begins now. Resets `at_boundary`."""
        may_join = (self.at_boundary and not self._is_closed) or self._is_open
        self.at_boundary = False
        return may_join
