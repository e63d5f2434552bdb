"""The base of all resolvers, with the interface of `tf.distribute.cluster_resolver.ClusterResolver`."""

from __future__ import annotations

import abc
from collections.abc import Mapping

from phalanx.cluster.spec import ClusterSpec, Task, is_index
from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import DEFAULT_PORT_BASE, PORT_BASE
from phalanx.devices.gpu_count import count_gpus
from phalanx.errors import ConfigurationError


class ClusterResolver(abc.ABC):
    """Finds the tasks of the job and the task of this process.

    A resolver reads the environment when it is queried, not when it is created, and opens nothing.

    Args:
        task_type: The type of this process's task, if the resolver should not find it itself.
        task_id: Its index.
        rpc_layer: Value of the property `rpc_layer`; nothing else depends on it.
        environ: The variables to read; the process's environment if not given.
    """

    # Defaults for custom subclasses that do not call __init__.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment = ""
    _num_accelerators: Mapping[str, int] | None = None

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._variables = process_environment() if environ is None else environ

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the job. Empty if there is only this process.

        Raises: ConfigurationError if the description in the environment is invalid.
        """

    def _find_task(self) -> Task | None:
        """Return this process's task as the environment describes it; None if there is no cluster."""
        return None

    @property
    def task_type(self) -> str | None:
        """The type of this process's task; None if there is no cluster."""
        if self._task_type is not None:
            return self._task_type
        task = self._find_task()
        return task.type if task else None

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process's task within its type; None if there is no cluster."""
        if self._task_id is not None:
            return self._task_id
        task = self._find_task()
        return task.index if task else None

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol between the tasks, for programs that print it."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str:
        """Empty unless given, as in TensorFlow outside Google."""
        return self._environment

    def task(self) -> Task | None:
        """Return this process's task; None if there is no cluster.

        Raises: ConfigurationError if only its type or only its index is known.
        """
        task_type, task_id = self.task_type, self.task_id
        if task_type is None and task_id is None:
            return None
        if task_type is None or task_id is None:
            raise ConfigurationError(
                f"{type(self).__name__} has task_type={task_type!r} and task_id={task_id!r}. Give both."
            )
        return Task(task_type, task_id)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task (by default this one), as `rpc_layer://host:port`.

        Empty if the cluster has only one task, as in `tf.distribute`.
        """
        spec = self.cluster_spec()
        if len(spec.tasks) <= 1:
            return ""
        task_type = task_type if task_type is not None else self.task_type
        task_id = task_id if task_id is not None else self.task_id
        if task_type is None or task_id is None:
            raise ConfigurationError(
                f"master() needs a task, but this process has none. Call master(task_type='worker', "
                f"task_id=0) with one of {', '.join(map(str, spec.tasks))}."
            )
        return format_master_url(spec.task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the accelerators of this process by kind, for example {"GPU": 2}; {} if it has none.

        Counts them without importing a backend: CUDA_VISIBLE_DEVICES if set, else the kernel's devices. The
        accelerators of other tasks are unknown, so `task_type`, `task_id` and `config_proto` have no effect.
        """
        del task_type, task_id, config_proto
        if self._num_accelerators is not None:
            return dict(self._num_accelerators)
        count = count_gpus(process_environment())
        return {"GPU": count} if count else {}


def format_master_url(address: str, rpc_layer: str | None) -> str:
    return f"{rpc_layer}://{address}" if rpc_layer else address


def read_integer(environment: Mapping[str, str], name: str, *, reader: str) -> int:
    """Return the value of a variable that a scheduler sets.

    Raises: ConfigurationError naming the variable and the resolver that reads it.
    """
    text = environment.get(name)
    if text is None:
        raise ConfigurationError(f"{reader} needs {name}, which is not set. Was this process started by it?")
    if not is_index(text.strip()):
        raise ConfigurationError(f"{reader} read {name}={text!r}, which is not a whole number.")
    return int(text)


def port_base(environment: Mapping[str, str], given: int | None) -> int:
    """Return the port of the first task on each host: `given`, else PHALANX_PORT_BASE, else the default."""
    if given is None:
        given = DEFAULT_PORT_BASE
        if environment.get(PORT_BASE):
            given = read_integer(environment, PORT_BASE, reader="the port of each task")
    if not 1 <= given <= 65535:
        raise ConfigurationError(f"the first port is {given}; write one from 1 to 65535 ({PORT_BASE}).")
    return given
