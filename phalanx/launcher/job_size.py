"""The default number of workers of a job, and the line that describes its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.devices.gpu_count import count_gpus

# Without GPUs, more processes are seldom faster than one, and each needs the memory of the whole model. Two are enough
# to demonstrate a job of several workers.
WORKERS_WITHOUT_GPU = 2

_KINDS = (
    (("chief", "worker"), "worker", "workers"),
    (("ps",), "parameter server", "parameter servers"),
    (("evaluator",), "evaluator", "evaluators"),
)


def default_workers(environment: Mapping[str, str]) -> tuple[int, str]:
    """Default number of workers on this host, and the reason.

    Args:
        environment: Environment variables; only CUDA_VISIBLE_DEVICES matters.
    """
    gpus = count_gpus(environment)
    if gpus:
        return gpus, "one for each GPU" if gpus > 1 else "this host has one GPU"
    return WORKERS_WITHOUT_GPU, "this host has no GPU"


def describe_start(tasks: Sequence[str], hosts: int, *, at_most: bool = False, reason: str = "") -> str:
    """Describe the start of a job in one line.

    Args:
        tasks: Names of all tasks.
        hosts: Number of hosts; 0 if unknown.
        at_most: Whether fewer workers may start.
        reason: Reason for the number of workers, if the user did not choose it.

    >>> describe_start(["worker/0", "worker/1", "ps/0"], 1)
    'starting 2 workers and 1 parameter server'
    """
    counts = []
    for names, one, several in _KINDS:
        count = sum(task.partition("/")[0] in names for task in tasks)
        if count:
            counts.append(f"{count} {one if count == 1 else several}")
    *others, last = counts
    what = f"{', '.join(others)} and {last}" if others else last
    where = f" on {hosts} hosts" if hosts > 1 else ""
    why = f" ({reason}; choose with --workers)" if reason else ""
    return f"starting {'up to ' * at_most}{what}{where}{why}"
