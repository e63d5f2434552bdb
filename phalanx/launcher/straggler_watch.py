"""Finds the stragglers of a job, from what its workers report."""

from __future__ import annotations

import math
from collections.abc import Collection

from phalanx.launcher.host_messages import WorkerReport
from phalanx.monitoring.stragglers import StepTiming, StragglerDetector
from phalanx.monitoring.worker_figures import WorkerFigures

COMPILED_STEPS = 2
"""A worker that has begun so many steps has finished the first one, in which it compiles the model."""
UNCOUNTED_S = 60.0
"""Of programs that report no steps, such as custom loops, what comes after this time counts."""
QUIET_S = 60.0
"""Between two notes about slow workers."""


class StragglerWatch:
    """Compares how long the workers compute and wait, from their second step on. When one has exited or joined, it
    forgets all timings: the others have waited for something else.

    Args:
        timeout_s: see `StragglerDetector`.
    """

    def __init__(self, *, timeout_s: float = float("inf")) -> None:
        self._detector = StragglerDetector(timeout_s=timeout_s)
        self._last: dict[str, WorkerFigures] = {}
        self._first_at: dict[str, float] = {}
        self._noted_at = -math.inf
        self._noted: set[str] = set()  # who was said to be slow
        self._names: dict[str, str] = {}
        self._members: set[str] | None = None
        self._changes = 0

    def add(self, report: WorkerReport, task: str, now: float) -> list[str]:
        """Record a report of a worker; returns lines to show.

        Args:
            report: what the worker reported.
            task: the task of the worker.
            now: seconds of a steady clock.
        """
        figures = report.figures
        if figures is None:
            return []
        former = self._last.get(task)
        self._last[task] = figures
        if self._members is None or task in self._members:
            self._names[task] = f"{task} (rank {report.rank})"
        first_at = self._first_at.setdefault(task, now)
        if former is not None and (former.steps >= COMPILED_STEPS or now - first_at >= UNCOUNTED_S):
            gained = figures.since(former)
            position = report.phase, report.epoch, report.step, report.age_s
            timing = StepTiming(*position, gained.computed_s, gained.waited_s, gained.steps)
            self._detector.add(task, timing, now)
        slow_before = set(self.slow)
        lines = self._detector.detect(self._names, self._changes, now)
        return self._worth_a_line(lines, slow_before, now)

    def _worth_a_line(self, lines: list[str], slow_before: set[str], now: float) -> list[str]:
        """Those of the lines that are shown: at most one note in a while, and the end of what was noted."""
        slow = set(self.slow)
        if slow - slow_before:
            if now - self._noted_at < QUIET_S:
                return []
            self._noted_at = now
            self._noted |= slow
        elif recovered := slow_before - slow:
            if not recovered & self._noted:
                return []
            self._noted -= recovered
        return lines

    @property
    def slow(self) -> list[str]:
        """The tasks that the others wait for."""
        return [task for task in self._names if self._detector.is_slow(task)]

    def use_members(self, tasks: Collection[str]) -> None:
        """From now on these tasks train together; the others, which have started, do not take part yet."""
        self._members = set(tasks)
        self._names = {task: name for task, name in self._names.items() if task in self._members}
        self._changes += 1

    def forget(self, task: str) -> None:
        """The worker of this task has exited."""
        if self._names.pop(task, None) is not None:
            self._changes += 1
        self._last.pop(task, None)
        self._first_at.pop(task, None)
