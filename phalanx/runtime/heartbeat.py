"""The sign of life that a process sends twice a second: its position in the program, and how long it has computed and
waited since the last one. In elastic jobs the coordinator receives it, in others the launcher."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from phalanx.monitoring.stragglers import StepTiming
from phalanx.runtime import progress

BEAT_S = 0.5
WINDOW = 10
"""Heartbeats over which the speed is measured."""


class Heartbeat:
    """Measures the time since the last call, and adds what the process last reported (`progress`).

    Args:
        waited_s: returns the seconds that the process has spent in collectives so far.
    """

    def __init__(self, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        self._waited_s = waited_s
        self._last = time.monotonic(), 0.0, progress.steps()
        self._window: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # time and steps of the last calls

    def __call__(self) -> StepTiming:
        now, waited_total_s, steps = time.monotonic(), self._waited_s(), progress.steps()
        last_now, last_waited_s, last_steps = self._last
        self._last = now, waited_total_s, steps
        self._window.append((now, steps))
        passed_s = now - last_now
        # Collectives in the background count twice, and one that ends just now may be missed once.
        waited_s = min(max(0.0, waited_total_s - last_waited_s), passed_s)
        report = progress.latest()
        if report is None:
            return StepTiming(computed_s=passed_s - waited_s, waited_s=waited_s)
        first_now, first_steps = self._window[0]
        return StepTiming(
            report.phase,
            report.epoch,
            report.step,
            max(0.0, time.time() - report.time),
            (steps - first_steps) / (now - first_now) if now > first_now else 0.0,
            passed_s - waited_s,
            waited_s,
            steps - last_steps,
        )


class TimingAnnouncer:
    """Reports to the launcher how long this process computes and waits, in a thread, until it is closed. For processes
    that have a launcher (`progress.has_launcher`).

    Args:
        waited_s: see `Heartbeat`.
    """

    def __init__(self, waited_s: Callable[[], float]) -> None:
        self._heartbeat = Heartbeat(waited_s)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="phalanx-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Safe to call twice."""
        self._closed.set()

    def _beat(self) -> None:
        number, steps, computed_s, waited_s = 0, 0, 0.0, 0.0
        while not self._closed.wait(BEAT_S):
            timing = self._heartbeat()
            number, steps = number + 1, steps + timing.steps
            computed_s, waited_s = computed_s + timing.computed_s, waited_s + timing.waited_s
            progress.record_totals(progress.ProgressTotals(number, computed_s, waited_s, steps))
