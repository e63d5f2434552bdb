"""What the tasks of a job must agree on, compared at their first contact. Pure functions over descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from phalanx.cluster.spec import CHIEF, PS, TASK_TYPES, WORKER, ClusterSpec

COMPARED_TYPES = (CHIEF, WORKER, PS)
"""The evaluator may stand in the cluster of some tasks and not of others; nobody waits for it."""

SAME_BACKEND = "same"
MIXED_BACKENDS = "mixed"


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the layers above know and the tasks must agree on.

    Attributes:
        keras: version of Keras.
        backend: Keras backend of this task.
        backend_policy: `same` if all tasks must have the same backend, `mixed` if each may have its own.
        seed: seed of the job; None if none was set.
        others: more that must be equal, by name, for example {"floatx": "float32"}.
    """

    keras: str = ""
    backend: str = ""
    backend_policy: str = SAME_BACKEND
    seed: int | None = None
    others: dict[str, str] = {}


class TaskDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a task says of itself when it meets another one.

    Attributes:
        task: its name, `worker/1`.
        incarnation: random, one for each process.
        host: identity of its host, see `host_identity`.
        address: where it listens.
        pid: its process id on its host.
        cluster: the addresses of all tasks as it knows them, by task name, without evaluators.
        phalanx: its version of Phalanx.
        facts: see `JobFacts`.
    """

    task: str
    incarnation: str
    host: str
    address: str
    pid: int
    cluster: dict[str, str]
    phalanx: str
    facts: JobFacts

    @property
    def whereabouts(self) -> str:
        return f"{self.task} (pid {self.pid} on {self.host})"


def describe_difference(variables: Sequence[object], others: Sequence[object], one: str, other: str) -> str | None:
    """Where two lists of variables part, in words; None if they are the same. `one` and `other` have them."""
    for index, (left, right) in enumerate(zip(variables, others, strict=False)):
        if left != right:
            return f"variable {index} is {left} on {one} and {right} on {other}."
    if len(variables) == len(others):
        return None
    longer, which = (variables, one) if len(variables) > len(others) else (others, other)
    extra = longer[min(len(variables), len(others))]
    return f"{one} has {len(variables)} variables and {other} has {len(others)}; only {which} has {extra}."


def cluster_by_task(spec: ClusterSpec) -> dict[str, str]:
    """The compared part of a cluster: addresses by task name."""
    return {str(task): str(spec.address(task)) for task in spec.tasks if task.type in COMPARED_TYPES}


def describe_disagreement(one: TaskDescription, other: TaskDescription) -> str | None:
    """What two tasks disagree about; None if they agree.

    The text names both tasks, each value of both, and what to do. It is the same whichever comes first, so
    that all tasks of the job end with the same words.
    """
    first, second = sorted((one, other), key=_order)
    differences = list(_differences(first, second))
    if not differences:
        return None
    return f"{first.whereabouts} and {second.whereabouts} cannot train together, because they disagree:\n" + "\n".join(
        f"  - {difference}" for difference in differences
    )


def _order(description: TaskDescription) -> tuple[int, int, str]:
    task_type, _, index = description.task.partition("/")
    position = TASK_TYPES.index(task_type) if task_type in TASK_TYPES else len(TASK_TYPES)
    return position, int(index) if index.isdigit() else 0, description.incarnation


def _differences(a: TaskDescription, b: TaskDescription) -> Iterator[str]:
    def both(what: str, of_a: object, of_b: object, advice: str) -> Iterator[str]:
        if of_a != of_b:
            yield f"{what}: {of_a!r} on {a.task}, {of_b!r} on {b.task}. {advice}"

    yield from both(
        "version of Phalanx",
        a.phalanx,
        b.phalanx,
        "Install the same one everywhere (pip install phalanx==...).",
    )
    yield from _cluster_differences(a, b)
    yield from both(
        "version of Keras",
        a.facts.keras,
        b.facts.keras,
        "Install the same one everywhere (pip install keras==...).",
    )
    yield from both(
        "backend policy",
        a.facts.backend_policy,
        b.facts.backend_policy,
        "Choose one in the program for all tasks.",
    )
    if a.facts.backend_policy == b.facts.backend_policy != MIXED_BACKENDS:
        yield from both(
            "Keras backend",
            a.facts.backend,
            b.facts.backend,
            "Set KERAS_BACKEND to the same value for all tasks.",
        )
    yield from both("seed", a.facts.seed, b.facts.seed, "Set PHALANX_SEED to the same value for all tasks.")
    for name in sorted({*a.facts.others, *b.facts.others}):
        yield from both(name, a.facts.others.get(name), b.facts.others.get(name), "Make it the same in every task.")


def _cluster_differences(a: TaskDescription, b: TaskDescription) -> Iterator[str]:
    advice = "The cluster in TF_CONFIG must be the same, character by character, in every task."
    for task in dict.fromkeys((*a.cluster, *b.cluster)):
        of_a, of_b = a.cluster.get(task), b.cluster.get(task)
        if of_a != of_b:
            yield (
                f"cluster: {task} is at {of_a or 'no address (it is not in the cluster)'} according to "
                f"{a.task}, and at {of_b or 'no address (it is not in the cluster)'} according to {b.task}. "
                f"{advice}"
            )
