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
        self._is_open = self._is_blocked = self._was_blocked = False

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """Allow others to join before any collective in the block: the caller can return to a common state."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Prevent others from joining in the block, even inside `anywhere`: a process that joins would not make this
        inner call."""
        before = self._is_open, self._is_blocked  # already blocked in a nested call: `predict` in a callback of `fit`
        self._is_open, self._is_blocked = False, True
        try:
            yield
        finally:
            self._is_open, self._is_blocked = before
            self._was_blocked = True

    def consume_blocked(self) -> bool:
        """Return whether there was a `blocked` section since the last call; if so, others may be waiting to join."""
        was_blocked, self._was_blocked = self._was_blocked, False
        return was_blocked

    def next_collective(self) -> bool:
        """Return whether others may join before the collective that begins now. Resets `at_boundary`."""
        may_join = (self.at_boundary and not self._is_blocked) or self._is_open
        self.at_boundary = False
        return may_join
