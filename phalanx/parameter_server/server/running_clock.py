"""The time that a server lets others take: of its own running.

What workers have sent while a server was stopped lies unread in its links when it goes on: counted by the time of the
day, they would all be late.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_S = 1.0
"""That a clock goes on without a tick."""


class RunningClock:
    """Goes on while `tick` is called at least every `LONGEST_S`; used by several threads, ticked by one."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic):
        self._monotonic = monotonic
        self._ticked = (monotonic(), 0.0)  # when, and what this clock said then: replaced together

    def __call__(self) -> float:
        """Seconds since it was made, less those of the stops."""
        at, said = self._ticked
        return said + min(self._monotonic() - at, LONGEST_S)

    def tick(self) -> None:
        now = self._monotonic()
        at, said = self._ticked
        self._ticked = (now, said + min(now - at, LONGEST_S))
