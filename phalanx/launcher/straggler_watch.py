"""Detects stragglers in a job of fixed size. In elastic jobs the coordinator does."""

from __future__ import annotations

from phalanx.launcher.host_messages import StepTimingReported
from phalanx.monitoring.stragglers import StepTiming, StragglerDetector


class StragglerWatch:
    """Compares the totals of computing and waiting that the workers report (`progress.ProgressTotals`)."""

    def __init__(self) -> None:
        self._detector = StragglerDetector()
        self._last: dict[int, StepTimingReported] = {}
        self._names: dict[str, str] = {}

    def add(self, report: StepTimingReported, task: str, now: float) -> list[str]:
        """Record a report of a worker; returns lines to show.

        Args:
            report: what the worker reported.
            task: the task of the worker.
            now: seconds of a steady clock.
        """
        member = str(report.rank)
        former = self._last.get(report.rank)
        self._last[report.rank] = report
        self._names[member] = f"{task} (rank {report.rank})"
        if former is not None:
            timing = StepTiming(
                computed_s=report.computed_s - former.computed_s,
                waited_s=report.waited_s - former.waited_s,
                steps=report.steps - former.steps,
            )
            self._detector.add(member, timing, now)
        return self._detector.detect(self._names, 0, now)

    def forget(self, rank: int) -> None:
        """The worker of this rank has ended."""
        self._last.pop(rank, None)
        self._names.pop(str(rank), None)
