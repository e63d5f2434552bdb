"""Compares what the tasks of a job must agree on, at their first contact. Pure functions over descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from phalanx.cluster.membership import Member, Rank
from phalanx.cluster.spec import CHIEF, PS, TASK_TYPES, WORKER, ClusterSpec
from phalanx.config.environment_variables import KERAS_BACKEND, SEED

COMPARED_TYPES = (CHIEF, WORKER, PS)
"""The compared types. Only some tasks may list the evaluator in their cluster, since no task waits for it."""

SAME_BACKEND = "same"
MIXED_BACKENDS = "mixed"


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the layers above add to the comparison.

    Attributes:
        keras: Version of Keras.
        backend: Keras backend of this task.
        backend_policy: `same` if all tasks must have the same backend, `mixed` if backends may differ.
        seed: Seed of the job; None if none was set.
        extra: Further values that must be equal, by name, for example {"floatx": "float32"}.
    """

    keras: str = ""
    backend: str = ""
    backend_policy: str = SAME_BACKEND
    seed: int | None = None
    extra: dict[str, str] = {}


class TaskDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A task's description of itself, sent to another task at their first contact.

    Attributes:
        task: Name of the task, such as `worker/1`.
        incarnation: Random identifier, different in each process.
        host: Identity of its host, see `host_identity`.
        address: Address of its listening port.
        pid: Process id on its host.
        cluster: The addresses of all tasks in its view, by task name, without evaluators.
        phalanx: Its version of Phalanx.
        facts: See `JobFacts`.
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
    def location(self) -> str:
        return f"{self.task} (pid {self.pid} on {self.host})"

    def as_member(self, rank: Rank) -> Member:
        return Member(rank, self.task, self.host, self.address, self.pid, self.incarnation)


def describe_difference(
    variables: Sequence[object], others: Sequence[object], task: str, other_task: str
) -> str | None:
    """Describe the first difference between two lists of variables in a sentence; None if they are equal.

    Args:
        variables, others: Descriptions of variables, in order.
        task, other_task: Names of the tasks that have them.
    """
    for index, (left, right) in enumerate(zip(variables, others, strict=False)):
        if left != right:
            return f"variable {index} is {left} on {task} and {right} on {other_task}."
    if len(variables) == len(others):
        return None
    longer, owner = (variables, task) if len(variables) > len(others) else (others, other_task)
    extra = longer[min(len(variables), len(others))]
    return f"{task} has {len(variables)} variables and {other_task} has {len(others)}; only {owner} has {extra}."


def cluster_by_task(spec: ClusterSpec) -> dict[str, str]:
    """Return the compared part of a cluster: addresses by task name."""
    return {str(task): str(spec.address(task)) for task in spec.tasks if task.type in COMPARED_TYPES}


def describe_disagreement(left: TaskDescription, right: TaskDescription) -> str | None:
    """Describe what two tasks disagree about; None if they agree.

    The text names both tasks, both values, and the remedy. It does not depend on the order of the arguments, so all
    tasks of the job end with the same message.
    """
    first, second = sorted((left, right), key=_order)
    differences = list(_differences(first, second))
    if not differences:
        return None
    return f"{first.location} and {second.location} cannot train together, because they disagree:\n" + "\n".join(
        f"  - {difference}" for difference in differences
    )


def _order(description: TaskDescription) -> tuple[int, int, str]:
    task_type, _, index = description.task.partition("/")
    position = TASK_TYPES.index(task_type) if task_type in TASK_TYPES else len(TASK_TYPES)
    return position, int(index) if index.isdigit() else 0, description.incarnation


def _differences(left: TaskDescription, right: TaskDescription) -> Iterator[str]:
    def compare(name: str, left_value: object, right_value: object, advice: str) -> Iterator[str]:
        if left_value != right_value:
            yield f"{name}: {left_value!r} on {left.task}, {right_value!r} on {right.task}. {advice}"

    install, set_variable = (
        "Install the same one everywhere (pip install {}==...).",
        "Set {} to the same value for all tasks.",
    )
    yield from compare("version of Phalanx", left.phalanx, right.phalanx, install.format("phalanx"))
    yield from _cluster_differences(left, right)
    one, other = left.facts, right.facts
    yield from compare("version of Keras", one.keras, other.keras, install.format("keras"))
    policies = one.backend_policy, other.backend_policy
    yield from compare("backend policy", *policies, "Choose one in the program for all tasks.")
    if policies == (SAME_BACKEND, SAME_BACKEND):
        yield from compare("Keras backend", one.backend, other.backend, set_variable.format(KERAS_BACKEND))
    yield from compare("seed", one.seed, other.seed, set_variable.format(SEED))
    for name in sorted({*one.extra, *other.extra}):
        yield from compare(name, one.extra.get(name), other.extra.get(name), "Make it the same in every task.")


def _cluster_differences(left: TaskDescription, right: TaskDescription) -> Iterator[str]:
    absent = "no address (it is not in the cluster)"
    for task in dict.fromkeys((*left.cluster, *right.cluster)):
        left_address, right_address = left.cluster.get(task, absent), right.cluster.get(task, absent)
        if left_address != right_address:
            yield (
                f"cluster: {task} is at {left_address} according to {left.task}, and at "
                f"{right_address} according to {right.task}. The cluster in TF_CONFIG must be the same, "
                f"character by character, in every task."
            )
