"""Names of tasks as the launcher has them, `worker/1`, `ps/0`, and the rank of the chief."""

from __future__ import annotations

CHIEF_RANK = 0
WITHOUT_REPLICA = ("ps/", "evaluator/")


def trains(task: str) -> bool:
    """Whether a task has a replica of the model that it trains. Servers and evaluators compute little, or at any time:
    they have no rank, and the cores are divided among the others."""
    return not task.startswith(WITHOUT_REPLICA)


def count_workers(number: int) -> str:
    """So many workers, in words.

    >>> count_workers(1)
    '1 worker'
    """
    return f"{number} worker{'s' * (number != 1)}"
