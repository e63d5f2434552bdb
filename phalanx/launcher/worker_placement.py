"""From hosts and a program to the placements of a job: ports, secret, environment."""

from __future__ import annotations

import numbers
import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.config.launch_config import LaunchConfig
from phalanx.config.task_names import trains
from phalanx.errors import ConfigurationError
from phalanx.launcher.host_messages import WorkerSpec
from phalanx.launcher.host_slots import HostShare
from phalanx.launcher.hosts.base_host import WorkerHost, WorkerPlacement
from phalanx.launcher.hosts.local_host import LocalHost
from phalanx.launcher.hosts.output_streams import OutputStreams
from phalanx.launcher.hosts.ssh_host import SSHHost
from phalanx.launcher.worker_environment import job_settings
from phalanx.transport.address import LOOPBACK

# Bytes of randomness: as long as the HMAC-SHA256 key that is derived from it.
SECRET_BYTES = 32
# ssh with a slow name service, and Python's start on a cold file system.
START_TIMEOUT_S = 60.0
# Practically forever, and within the limit of the operating system's waits (2**31 ms).
LONGEST_START_S = 1e6
# For a restarted task to answer again; a busy host takes long to import a backend.
RETURN_TIMEOUT_S = 120.0


def new_identity() -> tuple[str, str]:
    """The secret and the id of a new job."""
    return secrets.token_hex(SECRET_BYTES), secrets.token_hex(8)


def check_start_timeout(start_timeout_s: float | None) -> float | None:
    """Seconds that hosts and tasks wait for each other at the start; None leaves them to the default.

    Raises: ConfigurationError if it is not a number above 0.
    """
    if start_timeout_s is None:
        return None
    if not isinstance(start_timeout_s, numbers.Real) or not start_timeout_s > 0:
        raise ConfigurationError(f"start_timeout_s is {start_timeout_s!r}; give a number of seconds above 0.")
    return min(float(start_timeout_s), LONGEST_START_S)


def task_names(workers: int, *, chief: bool = False, servers: int = 0, evaluator: bool = False) -> list[str]:
    """The tasks of a job: those that train first, in rank order, then parameter servers and the evaluator.

    >>> task_names(2, servers=1)
    ['worker/0', 'worker/1', 'ps/0']
    """
    return [
        *(["chief/0"] if chief else []),
        *[f"worker/{index}" for index in range(workers)],
        *[f"ps/{index}" for index in range(servers)],
        *(["evaluator/0"] if evaluator else []),
    ]


@dataclass(frozen=True)
class WorkerRecipe:
    """The settings that the workers of a job have in common.

    Attributes:
        arguments: the program's command line, as after `python`.
        tasks: see `task_names`.
        config: backend, start timeout and preemption signal of the workers.
        interpreter: options of the interpreter itself, which stand before `arguments`.
        function: pickled; run instead of a program.
        restartable: whether a task that is killed may be restarted at its port.
        coordinator: address of the elastic coordinator; None for a job of fixed size.
        identity: the secret and the id of the job.
        run: value of PHALANX_RUN; None outside of `phalanx run`.
        prints_errors: see `WorkerSpec`.
    """

    arguments: Sequence[str]
    tasks: Sequence[str]
    config: LaunchConfig
    interpreter: Sequence[str] = ()
    function: bytes = b""
    restartable: bool = False
    coordinator: str | None = None
    identity: tuple[str, str] = field(default_factory=lambda: new_identity())
    run: str | None = None
    prints_errors: bool = True

    def placement(
        self, rank: int, addresses: Sequence[str], host: WorkerHost, slot: int | None = None
    ) -> WorkerPlacement:
        """The task of this rank, on a host.

        Args:
            addresses: `host:port` of every task, by rank.
            slot: see `WorkerSpec`.
        """
        task = self.tasks[rank]
        spec = WorkerSpec(
            rank=rank,
            arguments=tuple(self.arguments),
            interpreter=tuple(self.interpreter),
            function=self.function,
            trains=trains(task),
            devices=self.config.devices_per_worker,
            restartable=self.restartable,
            has_snapshots=self.restartable and task.startswith("ps/"),
            slot=slot,
            frees_port=self.coordinator is None,
            prints_errors=self.prints_errors,
            environment=job_settings(
                self.tasks,
                addresses,
                rank,
                self.identity,
                self.config,
                return_timeout_s=RETURN_TIMEOUT_S if self.restartable else None,
                coordinator=self.coordinator,
                run=self.run,
            ),
        )
        return WorkerPlacement(spec, task, host)


def place(
    shares: Sequence[HostShare],
    recipe: WorkerRecipe,
    selector: selectors.BaseSelector,
    streams: OutputStreams,
    say: Callable[[str], None],
) -> list[WorkerPlacement]:
    """Connect to the hosts and place the tasks on them; nothing of the job runs yet.

    Args:
        shares: the hosts, with as many slots as there are tasks, which take them in order.
        recipe: what the tasks have in common.
        selector: wakes when a host has something to report.
        streams: how outputs of workers on this host are connected.
        say: see `SSHHost`.

    Raises: RendezvousError or ConfigurationError if another host cannot take part.
    """
    hosts: list[LocalHost | SSHHost] = []
    try:
        for share in shares:
            host = LocalHost(selector, streams=streams) if share.is_here else SSHHost(selector, share, say=say)
            hosts.append(host)
            if isinstance(host, SSHHost):
                host.connect()  # all at once: the slowest decides, not the sum
        addresses: list[str] = []
        owners: list[WorkerHost] = []
        deadline = time.monotonic() + (recipe.config.start_timeout_s or START_TIMEOUT_S)
        for share, host in zip(shares, hosts, strict=True):
            name = LOOPBACK if share.is_loopback else share.name
            if isinstance(host, SSHHost):
                ports = host.ports(deadline)
            else:
                host.name = share.name
                ports = host.prepare(share.workers, address=name)
            addresses += [f"{name}:{port}" for port in ports]
            owners += [host] * share.workers
    except BaseException:
        for host in hosts:
            host.close()
        raise
    return [recipe.placement(rank, addresses, host) for rank, host in enumerate(owners)]
