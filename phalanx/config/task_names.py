"""Names of tasks as the launcher uses them, such as `worker/1` and `ps/0`, and the rank of the chief."""

from __future__ import annotations

CHIEF_RANK = 0
WITHOUT_REPLICA = ("ps/", "evaluator/")


def trains(task: str) -> bool:
    """Whether a task trains a replica of the model. Servers and evaluators compute little or at any time: they have no
    rank, and the cores are divided among the other tasks."""
    return not task.startswith(WITHOUT_REPLICA)


def count_workers(number: int) -> str:
    """Format a number of workers.

    >>> count_workers(1)
    '1 worker'
    """
    return f"{number} worker{'s' * (number != 1)}"
