"""Which worker speaks for all, where a program has not joined the job that would know."""

from __future__ import annotations

import json

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import TF_CONFIG
from phalanx.config.task_names import trains


def workers_of_first() -> int:
    """The number of tasks that train, if this is the first of them by TF_CONFIG; otherwise 0."""
    config = json.loads(process_environment().get(TF_CONFIG) or "{}")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    named = [f"{kind}/{index}" for kind in sorted(cluster) for index in range(len(cluster[kind]))]
    training = list(filter(trains, named))
    is_first = bool(training) and training[0] == f"{task.get('type')}/{task.get('index')}"
    return len(training) if is_first else 0


def has_servers() -> bool:
    """Whether the job has parameter servers."""
    return "ps" in json.loads(process_environment().get(TF_CONFIG) or "{}").get("cluster", {})
