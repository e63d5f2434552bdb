"""A clock that stands still while its process is stopped.

Messages that workers send while a server is stopped stay unread until it continues. By any other clock, all workers
would be late.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_TICK_S = 1.0
"""Seconds that the clock runs without a tick. `ParameterServer.run` ticks twice as often (`POLL_S`)."""


class RunningClock:
    """Clock that runs while `tick` is called at least every `MAX_TICK_S`. Read by several threads, ticked by one."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic):
        self._monotonic = monotonic
        # Time of the last tick, and the value of this clock then. One tuple, so that both are replaced at once.
        self._last_tick = (monotonic(), 0.0)

    def __call__(self) -> float:
        """Seconds since the clock was created, excluding time during which the process was stopped."""
        at, shown = self._last_tick
        return shown + min(self._monotonic() - at, MAX_TICK_S)

    def tick(self) -> None:
        """Record that the process is running."""
        now = self._monotonic()
        at, shown = self._last_tick
        self._last_tick = (now, shown + min(now - at, MAX_TICK_S))
