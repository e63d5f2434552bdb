"""The sign of life that a process sends twice a second: its position in the program, and how long it has computed and
waited since the last one. In elastic jobs the coordinator receives it, in others the launcher."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from phalanx.elastic.stragglers import StepTiming
from phalanx.runtime import progress

BEAT_S = 0.5
WINDOW = 10
"""Heartbeats over which the speed is taken."""


class Heartbeat:
    """Makes pulses from what the process reports to its launcher (`launcher.progress`).

    Args:
        waited_s: how many seconds the process has spent in collectives so far.
    """

    def __init__(self, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        self._waited_s = waited_s
        self._seen: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # when, how many steps there had been
        self._at = time.monotonic()
        self._waited_before_s = 0.0
        self._steps_before = progress.steps()

    def __call__(self) -> StepTiming:
        last, steps = progress.latest(), progress.steps()
        computed_s, waited_s = self._spent()
        if last is None:
            return StepTiming(computed_s=computed_s, waited_s=waited_s)
        return StepTiming(
            last.phase,
            last.epoch,
            last.step,
            max(0.0, time.time() - last.time),
            self._steps_per_s(steps),
            computed_s,
            waited_s,
            self._since_before(steps),
        )

    def _spent(self) -> tuple[float, float]:
        """Seconds outside of collectives and in them, since the pulse before."""
        now, waited_s = time.monotonic(), self._waited_s()
        passed_s = now - self._at
        # Collectives in the background count twice, and one that ends just now may be missed once.
        in_collectives_s = min(max(0.0, waited_s - self._waited_before_s), passed_s)
        self._at, self._waited_before_s = now, waited_s
        return passed_s - in_collectives_s, in_collectives_s

    def _since_before(self, steps: int) -> int:
        """Steps since the pulse before."""
        before, self._steps_before = self._steps_before, steps
        return steps - before

    def _steps_per_s(self, steps: int) -> float:
        self._seen.append((time.monotonic(), steps))
        since, first = self._seen[0]
        duration_s = time.monotonic() - since
        return (steps - first) / duration_s if duration_s > 0 else 0.0


class TimingAnnouncer:
    """Notes for the launcher how long this process computes and waits, in a thread, until it is closed. For processes
    that have a launcher (`progress.has_launcher`).

    Args:
        waited_s: see `Heartbeat`.
    """

    def __init__(self, waited_s: Callable[[], float]) -> None:
        self._heartbeat = Heartbeat(waited_s)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="phalanx-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Safe to call twice."""
        self._closed.set()

    def _beat(self) -> None:
        number, steps, computed_s, waited_s = 0, 0, 0.0, 0.0
        while not self._closed.wait(BEAT_S):
            pulse = self._heartbeat()
            number, steps = number + 1, steps + pulse.steps
            computed_s, waited_s = computed_s + pulse.computed_s, waited_s + pulse.waited_s
            progress.record_totals(progress.ProgressTotals(number, computed_s, waited_s, steps))
