"""How many workers a job has if the user names no number, and the line that says what starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.devices.gpu_count import count_gpus

# Without GPUs, more processes are seldom faster than one, and each needs the memory of the whole model. Two are enough
# to see a job of several workers.
WORKERS_WITHOUT_GPU = 2

_KINDS = (
    (("chief", "worker"), "worker", "workers"),
    (("ps",), "parameter server", "parameter servers"),
    (("evaluator",), "evaluator", "evaluators"),
)


def default_workers(environment: Mapping[str, str]) -> tuple[int, str]:
    """How many workers this host runs by default, and why.

    Args:
        environment: variables, of which CUDA_VISIBLE_DEVICES counts.
    """
    gpus = count_gpus(environment)
    if gpus:
        return gpus, "one for each GPU" if gpus > 1 else "this host has one GPU"
    return WORKERS_WITHOUT_GPU, "this host has no GPU"


def describe_start(tasks: Sequence[str], hosts: int, *, at_most: bool = False, reason: str = "") -> str:
    """What starts, in one line.

    Args:
        tasks: names of all tasks.
        hosts: number of hosts; 0 if they are not known yet.
        at_most: whether fewer workers may start.
        reason: why there are so many workers, if the user has not chosen.

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
