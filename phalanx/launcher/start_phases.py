"""Describes the phases of a job before its first step that take long enough to be shown. Pure."""

from __future__ import annotations

from phalanx.monitoring.preparation import FIRST_STEP, describe


class StartPhases:
    """Describes each phase once, for the first task that reports it, and none after the first step."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._has_trained = False

    def add(self, phase: str, epoch: int | None, step: int | None) -> str | None:
        """Add a task's progress report (`runtime.progress`); return a line to show if the phase is new."""
        # Reports are read at intervals, so the first step may be over before it is reported.
        self._has_trained |= bool(epoch or step)
        if self._has_trained or phase in self._shown:
            return None
        self._shown.add(phase)
        self._has_trained = phase == FIRST_STEP  # reported only if it takes a while
        return describe(phase)
