"""Finds the worker that warns on behalf of all, in a program that has not joined its job."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import TF_CONFIG
from phalanx.config.task_names import trains


class _Job(NamedTuple):
    workers: int
    is_first: bool
    has_servers: bool


def worker_count_if_first() -> int:
    """Number of tasks that train if this is the first of them by TF_CONFIG; otherwise 0."""
    job = _job()
    return job.workers if job.is_first else 0


def has_servers() -> bool:
    """Whether the job has parameter servers."""
    return _job().has_servers


def _job() -> _Job:
    return _read(process_environment().get(TF_CONFIG) or "{}")


@functools.cache  # a program may call this for each batch
def _read(tf_config: str) -> _Job:
    config = json.loads(tf_config)
    cluster, task = config.get("cluster", {}), config.get("task", {})
    named = [f"{kind}/{index}" for kind in sorted(cluster) for index in range(len(cluster[kind]))]
    training = list(filter(trains, named))
    is_first = bool(training) and training[0] == f"{task.get('type')}/{task.get('index')}"
    return _Job(len(training), is_first, "ps" in cluster)
