"""The cluster of processes started by an MPI launcher: `mpirun -n 4 python train.py`. MPI itself is not used."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.resolvers.base_resolver import ClusterResolver, port_base, read_integer
from phalanx.cluster.resolvers.host_list import HostTasks, expand_counts, expand_host_list, parse_hosts, worker_cluster
from phalanx.cluster.spec import WORKER, ClusterSpec, Task
from phalanx.config.environment_variables import HOSTS, PORT_BASE
from phalanx.errors import ConfigurationError

_READER = "MPIClusterResolver"


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables in which a launcher passes each process its rank."""

    rank: str
    size: str
    local_rank: str | None
    local_size: str | None


_LAUNCHERS = (
    # Open MPI, all versions.
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MVAPICH, before PMI because it also sets PMI's variables.
    _Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    # MPICH and Intel MPI (Hydra).
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # PMIx launchers that also set a size (PRRTE's prun does on request).
    _Launcher("PMIX_RANK", "PMIX_SIZE", None, None),
)


class MPIClusterResolver(ClusterResolver):
    """One worker per process, in the order of MPI's ranks.

    Rank and size come from the launcher's variables (Open MPI: OMPI_COMM_WORLD_*, MPICH and Intel MPI: PMI_*
    and MPI_LOCAL*, MVAPICH: MV2_*, PMIx). MPI provides neither hosts nor ports, which are derived:

    - Hosts: all processes are on this host if the launcher's local size equals the size. Otherwise the hosts come from
      PHALANX_HOSTS (`a:2,b:2`, set with `mpirun -x` or `-genv`) or the scheduler (SLURM_JOB_NODELIST with
      SLURM_TASKS_PER_NODE, or the file PBS_NODEFILE). Ranks must be numbered host by host (`--map-by slot`,
      the default).
    - Ports: `port_base` (8888, or PHALANX_PORT_BASE) + the local rank. Two jobs that share a host need different
      ports.

    Args:
        hosts: The hosts with their numbers of processes, instead of PHALANX_HOSTS.
        port_base: The first port on each host, instead of PHALANX_PORT_BASE.
        rpc_layer: Value of the property `rpc_layer`.
        environ: The variables to read; the process's environment if not given.
    """

    def __init__(
        self,
        hosts: str | None = None,
        port_base: int | None = None,
        rpc_layer: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ):
        super().__init__(rpc_layer=rpc_layer, environ=environ)
        self._given_hosts = hosts
        self._port_base = port_base

    def cluster_spec(self) -> ClusterSpec:
        hosts = self._hosts()
        self._check_local_rank(hosts)
        return worker_cluster(hosts, port_base(self._variables, self._port_base))

    def _find_task(self) -> Task:
        return Task(WORKER, self._number(self._launcher().rank))

    def _launcher(self) -> _Launcher:
        for launcher in _LAUNCHERS:
            if launcher.rank in self._variables and launcher.size in self._variables:
                return launcher
        raise ConfigurationError(
            f"{_READER} found none of {', '.join(one.rank for one in _LAUNCHERS)} together with its size: "
            f"this process was not started by mpirun or mpiexec. Start it as `mpirun -n 2 python train.py`, "
            f"or describe the cluster in TF_CONFIG."
        )

    def _number(self, name: str) -> int:
        return read_integer(self._variables, name, reader=_READER)

    def _optional(self, name: str | None) -> int | None:
        return self._number(name) if name and name in self._variables else None

    def _hosts(self) -> HostTasks:
        """Return the hosts in rank order with their numbers of processes."""
        launcher = self._launcher()
        size = self._number(launcher.size)
        if not 0 <= self._number(launcher.rank) < size:
            raise ConfigurationError(
                f"{launcher.rank}={self._variables[launcher.rank]} is not below "
                f"{launcher.size}={self._variables[launcher.size]}."
            )
        if self._optional(launcher.local_size) == size:
            return [("127.0.0.1", size)]  # a scheduler may have allocated more hosts
        listed = self._listed_hosts()
        if listed is None:
            if size == 1:
                return [("127.0.0.1", size)]
            raise ConfigurationError(
                f"the launcher started {size} processes without naming their hosts. Name them in rank "
                f"order with the number of processes on each: `mpirun -x {HOSTS}=host0:2,host1:2 ...` (Open "
                f"MPI) or `mpiexec -genv {HOSTS} host0:2,host1:2 ...` (MPICH), and {PORT_BASE} if 8888 is "
                f"taken."
            )
        where, hosts = listed
        slots = sum(count for _, count in hosts)
        if slots < size:
            raise ConfigurationError(
                f"{where} names {slots} places ({_format_hosts(hosts)}), but the launcher started {size} processes. "
                f"Correct one of them."
            )
        return _truncate_to(hosts, size)

    def _listed_hosts(self) -> tuple[str, HostTasks] | None:
        """Return the source of a list of hosts, and the list; None if there is none."""
        variables = self._variables
        if self._given_hosts:
            return "hosts", parse_hosts(self._given_hosts, where="hosts")
        if variables.get(HOSTS):
            return HOSTS, parse_hosts(variables[HOSTS], where=HOSTS)
        if variables.get("SLURM_JOB_NODELIST") and variables.get("SLURM_TASKS_PER_NODE"):
            names = expand_host_list(variables["SLURM_JOB_NODELIST"])
            counts = expand_counts(variables["SLURM_TASKS_PER_NODE"])
            if len(names) == len(counts):
                return "SLURM_JOB_NODELIST", list(zip(names, counts, strict=True))
        if variables.get("PBS_NODEFILE"):
            path = Path(variables["PBS_NODEFILE"])
            try:
                lines = path.read_text().split()
            except OSError as error:
                raise ConfigurationError(f"PBS_NODEFILE={str(path)!r} cannot be read: {error}.") from error
            return "PBS_NODEFILE", [(name, lines.count(name)) for name in dict.fromkeys(lines)]
        return None

    def _check_local_rank(self, hosts: HostTasks) -> None:
        """Check that the derived local rank of this process matches the launcher's."""
        launcher = self._launcher()
        local_rank = self._optional(launcher.local_rank)
        if local_rank is None:
            return
        rank = self._number(launcher.rank)
        owners = [(host, place) for host, count in hosts for place in range(count)]
        host, place = owners[rank]
        if place != local_rank:
            raise ConfigurationError(
                f"rank {rank} should be number {place} on {host} according to {_format_hosts(hosts)}, but the "
                f"launcher made it number {local_rank} on {socket.gethostname()}: ranks are not numbered "
                f"host by host, or the hosts are in another order. Start it with `--map-by slot`, or "
                f"correct {HOSTS}."
            )


def started_by_mpi(environ: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher has set its variables."""
    return any(launcher.rank in environ and launcher.size in environ for launcher in _LAUNCHERS)


def _truncate_to(hosts: HostTasks, size: int) -> HostTasks:
    """Return the first `size` slots."""
    result: HostTasks = []
    for host, count in hosts:
        taken = min(count, size - sum(number for _, number in result))
        if taken:
            result.append((host, taken))
    return result


def _format_hosts(hosts: HostTasks) -> str:
    return ",".join(f"{host}:{count}" for host, count in hosts)
