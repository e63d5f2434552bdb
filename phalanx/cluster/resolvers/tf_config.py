"""The cluster in the environment variable TF_CONFIG, in TensorFlow's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.spec import ClusterSpec, Task, check_task_type, is_index
from phalanx.config.environment_variables import TF_CONFIG
from phalanx.errors import ConfigurationError

MAX_SHOWN = 200
"""Maximum number of characters of an invalid value in a message."""
EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


class TFConfigClusterResolver(ClusterResolver):
    """Reads TF_CONFIG: `cluster` with the addresses by type, `task` with `type` and `index`.

    The evaluator may be in the cluster or outside it. If TF_CONFIG is not set or is `{}`, the cluster is empty and the
    process trains alone.

    Args:
        task_type: Replacement for the type in `task` of TF_CONFIG, which may then be missing.
        task_id: Replacement for its index.
        rpc_layer: Replacement for `rpc_layer` of TF_CONFIG.
        environment: Value of the property `environment`.
        environ: The variables to read; the process's environment if not given.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ):
        super().__init__(task_type, task_id, rpc_layer, environ)
        self._environment = environment or ""

    def _config(self) -> dict[str, Any]:
        return load_tf_config(self._variables.get(TF_CONFIG, ""))

    def cluster_spec(self) -> ClusterSpec:
        config = self._config()
        spec = read_cluster(config)
        task = self._find_task()
        if spec and task is not None:
            spec.check_member(task)
        return spec

    def _find_task(self) -> Task | None:
        if self._task_type is not None and self._task_id is not None:
            return Task(self._task_type, self._task_id)
        config = self._config()
        if not config:
            return None
        task_type, index = read_task(config)
        return Task(self._task_type or task_type, index if self._task_id is None else self._task_id)

    @property
    def rpc_layer(self) -> str | None:
        return self._rpc_layer if self._rpc_layer is not None else self._config().get("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """See the base class. As in TensorFlow, `session_master` of TF_CONFIG takes precedence."""
        session_master = self._config().get("session_master")
        return str(session_master) if session_master else super().master(task_type, task_id, rpc_layer)


def load_tf_config(text: str) -> dict[str, Any]:
    """Return TF_CONFIG as a dict; {} if it is empty.

    Raises: ConfigurationError if it is not a JSON object.
    """
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
    except ValueError as error:
        hint = " JSON requires double quotes." if "'" in text and '"' not in text else ""
        raise ConfigurationError(
            f"TF_CONFIG is not JSON: {error}. It is {_shorten(text)}.{hint} Write for example {EXAMPLE}"
        ) from error
    except RecursionError as error:
        raise ConfigurationError(
            f"TF_CONFIG is nested too deeply. It is {_shorten(text)}. Write for example {EXAMPLE}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"TF_CONFIG is {_shorten(text)}: JSON, but not an object. Write for example {EXAMPLE}")
    return config


def read_cluster(config: Mapping[str, Any]) -> ClusterSpec:
    """Return the cluster of a loaded TF_CONFIG.

    Raises: ConfigurationError naming the entry that is missing or wrong.
    """
    if not config:
        return ClusterSpec({})
    if "cluster" not in config:
        raise ConfigurationError(f"TF_CONFIG has no 'cluster', only {sorted(config)}. Write for example {EXAMPLE}")
    try:
        spec = ClusterSpec(config["cluster"])
        ranked = spec.ranked_tasks
    except ConfigurationError as error:
        raise ConfigurationError(f"In TF_CONFIG {error}") from error
    if spec and not ranked:
        raise ConfigurationError(
            f"TF_CONFIG has neither chief nor worker in 'cluster', which is {spec.as_dict()}. Add the workers' "
            f"addresses: "
            f'"worker": ["host0:2222", "host1:2222"].'
        )
    return spec


def read_task(config: Mapping[str, Any]) -> tuple[str, int]:
    """Return the type and index of the task of a loaded TF_CONFIG.

    Raises: ConfigurationError naming the entry that is missing or wrong.
    """
    example = '"task": {"type": "worker", "index": 0}'
    if "task" not in config:
        raise ConfigurationError(
            f"TF_CONFIG has no 'task', only {sorted(config)}: this process does not know which task of the "
            f"cluster it is. Add {example}, with another index in each process."
        )
    task = config["task"]
    if not isinstance(task, dict):
        raise ConfigurationError(f"task in TF_CONFIG is {task!r}. Write {example}.")
    for key in ("type", "index"):
        if key not in task:
            raise ConfigurationError(f"task in TF_CONFIG is {task!r}: it has no {key!r}. Write {example}.")
    check_task_type(task["type"], where="task.type in TF_CONFIG")
    index = task["index"]
    # Some job controllers write the index as a string, which TensorFlow also accepts.
    if isinstance(index, str) and is_index(index.strip()):
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ConfigurationError(
            f"task.index in TF_CONFIG is {_shorten(index)}. Write a whole number of at least 0, without quotes."
        )
    return task["type"], index


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    shortened = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
    return repr(shortened) if isinstance(value, str) else shortened
