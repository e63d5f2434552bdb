"""What a job does before its first step, as far as it takes long enough to be shown. Pure: reports in, lines out."""

from __future__ import annotations

from phalanx.runtime.progress import IMPORT_OF

FIRST_STEP = "gradients"
"""The phase of a worker that computes. It is seen in the first step if that takes a while."""


class StartPhases:
    """Each phase is shown once, for the first task that reports it, and none after the first step."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._has_trained = False

    def add(self, phase: str) -> str | None:
        """A task reports what it does (`runtime.progress`); returns a line to show, if it is news."""
        if self._has_trained or phase in self._shown:
            return None
        if phase.startswith(IMPORT_OF):
            self._shown.add(phase)
            return f"importing {phase.removeprefix(IMPORT_OF)}"
        if phase == FIRST_STEP:
            self._has_trained = True
            return "first step (JAX and TensorFlow compile the model)"
        return None
