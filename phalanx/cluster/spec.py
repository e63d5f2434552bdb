"""The description of a cluster: its tasks, their addresses, and their ranks."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.transport.address import Address

CHIEF = "chief"
WORKER = "worker"
PS = "ps"
EVALUATOR = "evaluator"

TASK_TYPES = (CHIEF, WORKER, PS, EVALUATOR)
RANKED_TYPES = (CHIEF, WORKER)
"""The types whose tasks hold a replica, in rank order. Parameter servers and evaluators have no rank."""

_MISTAKEN_TYPES = {"master": CHIEF, "workers": WORKER, "parameter_server": PS, "eval": EVALUATOR}
"""Common mistakes and their meaning; `master` is TensorFlow 1's name for the chief."""

Tasks = Sequence[str] | Mapping[int, str] | Mapping[str, str]


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One task of a cluster, written `worker/1`.

    Attributes:
        type: `chief`, `worker`, `ps` or `evaluator`.
        index: Number of the task among the tasks of its type, from 0.
    """

    type: str
    index: int

    def __post_init__(self) -> None:
        check_task_type(self.type, where="the task's type")
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise ConfigurationError(
                f"the index of a {self.type} task is {self.index!r}. Write a whole number of at least 0."
            )

    def __str__(self) -> str:
        return f"{self.type}/{self.index}"


class ClusterSpec:
    """The tasks of a cluster and their addresses, with the methods of `tf.train.ClusterSpec`.

    Args:
        cluster: Task types with the addresses of their tasks, as a list or, if indices are missing, as a mapping from
            index to address. Or another ClusterSpec, or TensorFlow's `ClusterSpec` or `ClusterDef`.

    Raises: ConfigurationError if a type is unknown, or an address is malformed or used twice.

    >>> spec = ClusterSpec({"worker": ["a:2222", "b:2222"], "ps": ["c:2222"]})
    >>> [str(task) for task in spec.ranked_tasks]
    ['worker/0', 'worker/1']
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, Tasks]):
        if isinstance(cluster, ClusterSpec):
            self._tasks: dict[str, dict[int, str]] = cluster._tasks
            return
        if hasattr(cluster, "as_dict"):  # TensorFlow's
            cluster = cluster.as_dict()
        elif hasattr(cluster, "job"):  # its ClusterDef
            cluster = {job.name: dict(job.tasks) for job in cluster.job}
        if not isinstance(cluster, Mapping):
            raise ConfigurationError(
                f"the cluster is {cluster!r}. Write a mapping from task types to lists of addresses, "
                f"for example {{'worker': ['host0:2222', 'host1:2222']}}."
            )
        self._tasks = {}
        for job_name, tasks in cluster.items():
            where = f"cluster.{job_name}"
            check_task_type(job_name, where=f"the cluster's key {job_name!r}")
            self._tasks[job_name] = {
                index: str(Address.parse(text, where=f"{where}[{index}]")) for index, text in _indexed(tasks, where)
            }
        self._check_addresses_differ()
        if len(self._tasks.get(CHIEF, ())) > 1:
            raise ConfigurationError(
                f"cluster.chief has {len(self._tasks[CHIEF])} tasks, but a job has at most one chief. "
                f"Move the others to cluster.worker."
            )

    def _check_addresses_differ(self) -> None:
        first: dict[str, str] = {}
        for job_name, tasks in self._tasks.items():
            for index, address in tasks.items():
                where = f"cluster.{job_name}[{index}]"
                if address in first:
                    raise ConfigurationError(
                        f"{first[address]} and {where} have the same address {address!r}. Give "
                        f"one of them another port or host."
                    )
                first[address] = where

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._tasks == other._tasks
        return self.as_dict() == other if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as tf.train.ClusterSpec

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return task types with their addresses: a list, or a dict by index if indices are missing."""
        result: dict[str, list[str] | dict[int, str]] = {}
        for job_name, tasks in self._tasks.items():
            ordered = dict(sorted(tasks.items()))
            dense = list(ordered) == list(range(len(ordered)))
            result[job_name] = list(ordered.values()) if dense and ordered else ordered
        return result

    def as_cluster_def(self) -> Any:
        """Return the cluster as TensorFlow's `ClusterDef`, which `tf.train.ClusterSpec` also accepts.

        Raises: UnsupportedError if TensorFlow is not installed.
        """
        if importlib.util.find_spec("tensorflow") is None:
            raise UnsupportedError(
                "as_cluster_def() makes a message of TensorFlow, which is not installed; use as_dict()."
            )
        definition = importlib.import_module("tensorflow.core.protobuf.cluster_pb2").ClusterDef()
        for job_name, tasks in sorted(self._tasks.items()):
            job = definition.job.add(name=job_name)
            job.tasks.update(tasks)
        return definition

    @property
    def jobs(self) -> list[str]:
        """The task types of the cluster."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of this type."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the tasks of this type, in order."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the `host:port` of one task."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ConfigurationError(
                f"there is no {job_name}/{task_index} in the cluster, which has {_list_tasks(job_name, tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of the tasks of this type by index; None where an index is missing."""
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._tasks:
            raise ConfigurationError(f"the cluster has no {job_name!r} tasks, only {self.jobs}.")
        return self._tasks[job_name]

    # ------------------------------------------------- beyond tf.train.ClusterSpec

    def __contains__(self, task: Task) -> bool:
        return task.index in self._tasks.get(task.type, {})

    def address(self, task: Task) -> Address:
        """Return the address of one task."""
        return Address.parse(self.task_address(task.type, task.index), where=str(task))

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks: chief, workers, parameter servers and evaluators, each type ordered by index."""
        return tuple(
            Task(job_name, index) for job_name in TASK_TYPES for index in sorted(self._tasks.get(job_name, ()))
        )

    @property
    def ranked_tasks(self) -> tuple[Task, ...]:
        """The tasks that hold a replica, in rank order: the chief first, then the workers.

        Without a `chief`, worker 0 has rank 0 and is the chief. Parameter servers and evaluators have no rank.

        Raises: ConfigurationError if the workers' indices have gaps.
        """
        tasks = tuple(task for task in self.tasks if task.type in RANKED_TYPES)
        workers = [task.index for task in tasks if task.type == WORKER]
        if workers != list(range(len(workers))):
            raise ConfigurationError(
                f"cluster.worker has the indices {workers}: one is absent in between. Number the workers "
                f"from 0 without gaps, or write their addresses as a list."
            )
        return tasks

    @property
    def chief(self) -> Task:
        """The task with rank 0."""
        ranked = self.ranked_tasks
        if not ranked:
            raise ConfigurationError(f"the cluster has neither chief nor worker, only {self.jobs}. Add a worker.")
        return ranked[0]

    def check_member(self, task: Task) -> None:
        """Raise ConfigurationError unless `task` is in the cluster, or is an evaluator outside it."""
        if task in self or (task.type == EVALUATOR and EVALUATOR not in self._tasks):
            return
        if task.type not in self._tasks:
            raise ConfigurationError(
                f"this task is {task}, but the cluster has no {task.type!r} tasks, only "
                f"{', '.join(map(repr, self.jobs)) or 'none at all'}. Correct task.type or add "
                f"cluster.{task.type}."
            )
        known = _list_tasks(task.type, self._tasks[task.type])
        raise ConfigurationError(
            f"this task is {task}, but the cluster has only {known}. Correct task.index (the first is 0), "
            f"or add the task's address to cluster.{task.type}."
        )


def check_task_type(name: object, *, where: str) -> None:
    """Raise ConfigurationError unless `name` is one of the four task types."""
    if name in TASK_TYPES:
        return
    meant = _MISTAKEN_TYPES.get(str(name).strip().lower()) or str(name).strip().lower()
    advice = f"Write {meant!r}." if meant in TASK_TYPES else f"Write one of {', '.join(TASK_TYPES)}."
    raise ConfigurationError(f"{where}: {name!r} is not a task type. The types are {', '.join(TASK_TYPES)}. {advice}")


def _indexed(tasks: Any, where: str) -> Iterable[tuple[int, object]]:
    if isinstance(tasks, list | tuple):
        return list(enumerate(tasks))
    if isinstance(tasks, Mapping):
        return [(_index(key, where), text) for key, text in tasks.items()]
    raise ConfigurationError(f"{where} is {tasks!r}. Write a list of addresses, for example ['host0:2222'].")


def _index(key: object, where: str) -> int:
    # JSON keys are always strings, so "1" is also an index.
    text = str(key)
    if isinstance(key, bool) or not is_index(text):
        raise ConfigurationError(f"{where} has the key {key!r}. Its keys are task indices: whole numbers from 0.")
    return int(text)


def is_index(text: str) -> bool:
    """Return whether the text is an integer of 1 to 18 ASCII digits; int() also accepts other scripts and `1_0`."""
    return re.fullmatch("[0-9]{1,18}", text) is not None


def _list_tasks(job_name: str, tasks: Mapping[int, str]) -> str:
    return ", ".join(f"{job_name}/{index} ({address})" for index, address in sorted(tasks.items())) or "none"
