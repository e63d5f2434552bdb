"""Where in its program an elastic process lets others join: before which collectives all members are alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class JoinPoints:
    """The join points of one process; equal on all members.

    Attributes:
        at_boundary: whether the next collective is the merge of a training step, before which others may join.
    """

    def __init__(self) -> None:
        self.at_boundary = False
        self._is_open = self._is_closed = self._was_closed = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """While inside, others may join before any collective: the caller can return to a common state."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    @contextmanager
    def closed(self) -> Iterator[None]:
        """While inside, no others may join, even inside `open`: a process that joins would not make this inner call."""
        before = self._is_open, self._is_closed  # closed already in a call of a call: `predict` in a callback of `fit`
        self._is_open, self._is_closed = False, True
        try:
            yield
        finally:
            self._is_open, self._is_closed = before
            self._was_closed = True

    def was_closed(self) -> bool:
        """Whether there was a `closed` section since the last call, after which others may be waiting to join."""
        was_closed, self._was_closed = self._was_closed, False
        return was_closed

    def next_collective(self) -> bool:
        """Whether others may join before the collective that begins now."""
        may_join = (self.at_boundary and not self._is_closed) or self._is_open
        self.at_boundary = False
        return may_join
