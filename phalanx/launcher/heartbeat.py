"""What a process says of itself twice a second: not only that it lives, but how far it has come, and how long it has
computed and waited for that. In elastic jobs the keeper is told, in others the launcher."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from phalanx.launcher import progress
from phalanx.paces import Pulse

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
        self._seen: deque[tuple[float, int | None, int]] = deque(maxlen=WINDOW)  # when, which epoch, which step
        self._at = time.monotonic()
        self._waited_before_s = 0.0
        self._place: tuple[int | None, int] | None = None  # epoch and step of the pulse before

    def __call__(self) -> Pulse:
        last = progress.latest()
        computed_s, waited_s = self._spent()
        if last is None:
            return Pulse(computed_s=computed_s, waited_s=waited_s)
        return Pulse(
            last.phase,
            last.epoch,
            last.step,
            max(0.0, time.time() - last.time),
            self._steps_per_s(last),
            computed_s,
            waited_s,
            self._steps(last),
        )

    def _spent(self) -> tuple[float, float]:
        """Seconds outside of collectives and in them, since the pulse before."""
        now, waited_s = time.monotonic(), self._waited_s()
        passed_s = now - self._at
        # Collectives in the background count twice, and one that ends just now may be missed once.
        in_collectives_s = min(max(0.0, waited_s - self._waited_before_s), passed_s)
        self._at, self._waited_before_s = now, waited_s
        return passed_s - in_collectives_s, in_collectives_s

    def _steps(self, last: progress.Progress) -> int:
        """Steps since the pulse before; those at the end of an epoch that is over are left out."""
        if last.step is None:
            return 0
        former, self._place = self._place, (last.epoch, last.step)
        if former is None:
            return 0
        return max(0, last.step - former[1]) if former[0] == last.epoch else last.step

    def _steps_per_s(self, last: progress.Progress) -> float:
        """Within the running epoch; programs that know of none count their steps alone."""
        if last.step is None:
            self._seen.clear()
            return 0.0
        if self._seen and self._seen[-1][1] != last.epoch:
            self._seen.clear()
        self._seen.append((time.monotonic(), last.epoch, last.step))
        since, _, first = self._seen[0]
        duration_s = time.monotonic() - since
        return (last.step - first) / duration_s if duration_s > 0 else 0.0


class Announcer:
    """Notes for the launcher how long this process computes and waits, in a thread, until it is closed. For processes
    that have a launcher (`progress.is_read`).

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
            progress.note(progress.Totals(number, computed_s, waited_s, steps))
