"""What a job does before its first step, as far as it takes long enough to be shown. Pure: reports in, lines out."""

from __future__ import annotations

from phalanx.monitoring.preparation import FIRST_STEP, describe


class StartPhases:
    """Each phase is shown once, for the first task that reports it, and none after the first step."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._has_trained = False

    def add(self, phase: str, epoch: int | None, step: int | None) -> str | None:
        """A task reports what it does (`runtime.progress`); returns a line to show, if it is news."""
        # Reports are read at intervals: the first step may be over before one is seen.
        self._has_trained |= bool(epoch or step)
        if self._has_trained or phase in self._shown:
            return None
        self._shown.add(phase)
        self._has_trained = phase == FIRST_STEP  # seen if it takes a while
        return describe(phase)
