"""A clock that stands still while its process is stopped.

What workers send while a server is stopped stays unread in its links until the server continues: by any other clock
they would all be late.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_TICK_S = 1.0
"""How long the clock runs without a tick. `ParameterServer.run` ticks twice as often (`POLL_S`)."""


class RunningClock:
    """Runs while `tick` is called at least every `MAX_TICK_S`. Read by several threads, ticked by one."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic):
        self._monotonic = monotonic
        # When the last tick was, and what this clock showed then. One tuple, so that both are replaced together.
        self._last_tick = (monotonic(), 0.0)

    def __call__(self) -> float:
        """Seconds since the clock was created, without those during which the process was stopped."""
        at, shown = self._last_tick
        return shown + min(self._monotonic() - at, MAX_TICK_S)

    def tick(self) -> None:
        """The process is running."""
        now = self._monotonic()
        at, shown = self._last_tick
        self._last_tick = (now, shown + min(now - at, MAX_TICK_S))
