"""Finds the stragglers of a job, from what its workers report."""

from __future__ import annotations

from collections.abc import Collection

from phalanx.launcher.host_messages import WorkerReport
from phalanx.monitoring.stragglers import StepTiming, StragglerDetector
from phalanx.monitoring.worker_figures import WorkerFigures


class StragglerWatch:
    """Compares how long the workers compute and wait. When one has exited or joined, it forgets all timings: the others
    have waited for something else.

    Args:
        timeout_s: see `StragglerDetector`.
    """

    def __init__(self, *, timeout_s: float = float("inf")) -> None:
        self._detector = StragglerDetector(timeout_s=timeout_s)
        self._last: dict[str, WorkerFigures] = {}
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
        if former is not None:
            timing = StepTiming(
                report.phase,
                report.epoch,
                report.step,
                report.age_s,
                figures.computed_s - former.computed_s,
                figures.waited_s - former.waited_s,
                figures.steps - former.steps,
            )
            self._detector.add(task, timing, now)
        return self._detector.detect(self._names, self._changes, now)

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
