"""What a process does before its first step is over: it imports libraries, receives values, and compiles the step.

That is no training, so it counts as starting, and not as computing.
"""

from __future__ import annotations

IMPORT_OF = "import of "
"""As in `runtime.progress`."""
FIRST_STEP = "gradients"
"""The phase of a step that computes: the first one also compiles."""
_PHASES = ("start of the program", "initial values", "compilation", FIRST_STEP)


def is_preparation(phase: str, steps: int) -> bool:
    """Whether a process prepares.

    Args:
        phase: what it does.
        steps: that it has begun; the first one is over when another begins, or when it gets to another phase.
    """
    return steps <= 1 and (phase in _PHASES or phase.startswith(IMPORT_OF))
