"""Which worker of a job of fixed size is slow. In jobs whose members come and go the keeper sees to that."""

from __future__ import annotations

from phalanx.elastic.stragglers import StepTiming, StragglerDetector
from phalanx.launcher.host_messages import StepTimingReported


class StragglerWatch:
    """Compares what the workers note of their computing and waiting (`progress.Totals`)."""

    def __init__(self) -> None:
        self._paces = StragglerDetector()
        self._last: dict[int, StepTimingReported] = {}
        self._names: dict[str, str] = {}

    def take(self, pace: StepTimingReported, task: str, now: float) -> list[str]:
        """A worker goes like this; what is to be said of any."""
        former = self._last.get(pace.rank)
        self._last[pace.rank] = pace
        self._names[str(pace.rank)] = f"{task} (rank {pace.rank})"
        if former is not None:
            pulse = StepTiming(
                computed_s=pace.computed_s - former.computed_s,
                waited_s=pace.waited_s - former.waited_s,
                steps=pace.steps - former.steps,
            )
            self._paces.hear(str(pace.rank), pulse, now)
        return self._paces.judge(self._names, 0, now)

    def forget(self, rank: int) -> None:
        """A worker has ended."""
        self._last.pop(rank, None)
        self._names.pop(str(rank), None)
