"""What a process does before its first step is over: it imports libraries, receives values, and compiles the step.

That is no training, so it counts as starting, and not as computing.
"""

from __future__ import annotations

IMPORT_OF = "import of "
"""The beginning of a phase in which the program imports a library."""
FIRST_STEP = "gradients"
"""The phase of a step that computes: the first one also compiles."""
_PHASES = ("start of the program", "initial values", "compilation", FIRST_STEP)


def describe(phase: str) -> str | None:
    """One of the two phases that take long enough to be shown, in words; None for others."""
    if phase.startswith(IMPORT_OF):
        return f"importing {phase.removeprefix(IMPORT_OF)}"
    return "first step (JAX and TensorFlow compile the model)" if phase == FIRST_STEP else None


def is_preparation(phase: str, steps: int) -> bool:
    """Whether a process prepares.

    Args:
        phase: what it does.
        steps: that it has begun; the first one is over when another begins, or when it gets to another phase.
    """
    return steps <= 1 and (phase in _PHASES or phase.startswith(IMPORT_OF))
