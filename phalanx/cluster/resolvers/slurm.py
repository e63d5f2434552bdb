"""The cluster of a Slurm job step: `srun python train.py`."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cluster.resolvers.base_resolver import ClusterResolver, port_base, read_integer
from phalanx.cluster.resolvers.host_list import (
    HostTasks,
    expand_counts,
    expand_host_list,
    interleave_hosts,
    worker_cluster,
)
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.errors import ConfigurationError

_READER = "SlurmClusterResolver"


class SlurmClusterResolver(ClusterResolver):
    """One task per process of the job step, in the order of SLURM_PROCID.

    Reads the variables that `srun` sets: SLURM_PROCID (the number of this process), SLURM_STEP_NODELIST and
    SLURM_STEP_TASKS_PER_NODE (hosts and their numbers of processes), SLURM_DISTRIBUTION (how processes are numbered
    over the hosts: `block`, the default, or `cyclic`), and SLURM_NODEID, which must match the derived host.
    Slurm assigns no ports: the first process on each host gets `port_base` (8888, or PHALANX_PORT_BASE), each further
    process the next port. Two jobs that share a host need different ports.

    Args:
        jobs: Number of tasks of each type, in the order of their process numbers, for example
            {"chief": 1, "worker": 3, "evaluator": 1}. All are workers if not given.
        port_base: The first port on each host.
        gpus_per_node: Ignored; accepted for compatibility with TensorFlow. Slurm itself binds GPUs to processes
            (`--gpus-per-task`).
        gpus_per_task: Ignored.
        tasks_per_node: Number of processes on each host, as one number or a mapping by host name; from the environment
            if not given.
        auto_set_gpu: Ignored.
        rpc_layer: Value of the property `rpc_layer`.
        environ: The variables to read; the process's environment if not given.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ):
        super().__init__(rpc_layer=rpc_layer, environ=environ)
        del gpus_per_node, gpus_per_task, auto_set_gpu
        self._jobs = dict(jobs) if jobs is not None else None
        self._port_base = port_base
        self._tasks_per_node = tasks_per_node

    def cluster_spec(self) -> ClusterSpec:
        hosts = self._hosts()
        by_process = worker_cluster(self._in_rank_order(hosts), port_base(self._variables, self._port_base))
        addresses = [str(address) for address in by_process.job_tasks("worker")]
        self._check_host(hosts, addresses)
        cluster: dict[str, list[str]] = {}
        for task, address in zip(self._tasks(len(addresses)), addresses, strict=True):
            cluster.setdefault(task.type, []).append(address)
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str, int]:
        """Return the type and index of this process's task."""
        task = self._find_task()
        return task.type, task.index

    def _find_task(self) -> Task:
        tasks = self._tasks(sum(count for _, count in self._hosts()))
        process = read_integer(self._variables, "SLURM_PROCID", reader=_READER)
        if process >= len(tasks):
            raise ConfigurationError(
                f"SLURM_PROCID={process}, but the job step has only {len(tasks)} processes according to its "
                f"lists of hosts and of tasks per host."
            )
        return tasks[process]

    def _tasks(self, count: int) -> list[Task]:
        """Return the task of each process, by process number."""
        jobs = self._jobs if self._jobs is not None else {"worker": count}
        if sum(jobs.values()) != count:
            raise ConfigurationError(
                f"jobs={jobs} names {sum(jobs.values())} tasks, but the job step has {count} processes. "
                f"Start it with `srun --ntasks={sum(jobs.values())}` or correct `jobs`."
            )
        return [Task(task_type, index) for task_type, number in jobs.items() for index in range(number)]

    def _hosts(self) -> HostTasks:
        names = expand_host_list(self._variable("NODELIST"))
        if isinstance(self._tasks_per_node, int):
            return [(name, self._tasks_per_node) for name in names]
        if self._tasks_per_node is not None:
            given = self._tasks_per_node
            # Slurm numbers processes in the order of its hosts. Names that are not Slurm's keep the given order.
            return [(name, given[name]) for name in names] if given.keys() == set(names) else list(given.items())
        counts = expand_counts(self._variable("TASKS_PER_NODE"))
        if len(counts) != len(names):
            raise ConfigurationError(
                f"Slurm names {len(names)} hosts ({', '.join(names)}), but tasks for {len(counts)} "
                f"({counts}). Start the program with `srun`, or give tasks_per_node."
            )
        return list(zip(names, counts, strict=True))

    def _in_rank_order(self, hosts: HostTasks) -> HostTasks:
        distribution = self._variables.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
        if distribution in ("", "block", "*"):
            return hosts
        if distribution == "cyclic":
            return interleave_hosts(hosts)
        raise ConfigurationError(
            f"SLURM_DISTRIBUTION={distribution!r}: only block and cyclic numbering of processes are "
            f"supported. Start the step with `srun --distribution=block`."
        )

    def _check_host(self, hosts: HostTasks, addresses: list[str]) -> None:
        """Check that the derived host of this process matches Slurm's."""
        if "SLURM_NODEID" not in self._variables:
            return
        node = read_integer(self._variables, "SLURM_NODEID", reader=_READER)
        process = read_integer(self._variables, "SLURM_PROCID", reader=_READER)
        if node >= len(hosts) or process >= len(addresses):
            raise ConfigurationError(
                f"SLURM_NODEID={node} and SLURM_PROCID={process} do not fit {len(hosts)} hosts with "
                f"{len(addresses)} processes."
            )
        derived = addresses[process].rpartition(":")[0]
        if derived != hosts[node][0]:
            raise ConfigurationError(
                f"Slurm started process {process} on {hosts[node][0]}, where {derived} was expected: its "
                f"processes are not numbered host by host. Start the step with `srun --distribution=block`."
            )

    def _variable(self, name: str) -> str:
        """Return the step's variable, or else the job's."""
        for full in (f"SLURM_STEP_{name}", f"SLURM_{name}", f"SLURM_JOB_{name}"):
            if self._variables.get(full):
                return self._variables[full]
        raise ConfigurationError(
            f"{_READER} needs SLURM_STEP_{name}, which is not set: this process was not started by `srun`. "
            f"Start it as `srun python train.py`, or describe the cluster in TF_CONFIG."
        )
