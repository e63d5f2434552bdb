"""Phases of a process until its first step is complete: importing libraries, receiving values, compiling the step.

They count as starting, not as computing, because the process does not train yet.
"""

from __future__ import annotations

IMPORT_OF = "import of "
"""Prefix of a phase in which the program imports a library."""
FIRST_STEP = "gradients"
"""Phase of a step that computes. The first step also compiles."""
_PHASES = ("start of the program", "initial values", "compilation", FIRST_STEP)


def describe(phase: str) -> str | None:
    """Description of a phase that takes long enough to be shown; None for others."""
    if phase.startswith(IMPORT_OF):
        return f"importing {phase.removeprefix(IMPORT_OF)}"
    return "first step (JAX and TensorFlow compile the model)" if phase == FIRST_STEP else None


def is_preparation(phase: str, steps: int) -> bool:
    """Whether a process is preparing.

    Args:
        phase: Current phase of the process.
        steps: Number of steps begun. The first is complete when the next step begins or the process enters another
            phase.
    """
    return steps <= 1 and (phase in _PHASES or phase.startswith(IMPORT_OF))
