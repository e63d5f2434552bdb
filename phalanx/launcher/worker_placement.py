"""Places the tasks of a job on hosts: ports, secret, environment."""

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
from phalanx.launcher.host_slots import HostSpec
from phalanx.launcher.hosts.base_host import WorkerHost, WorkerPlacement
from phalanx.launcher.hosts.local_host import LocalHost
from phalanx.launcher.hosts.output_streams import OutputStreams
from phalanx.launcher.hosts.ssh_host import SSHHost
from phalanx.launcher.worker_environment import job_settings
from phalanx.transport.address import LOOPBACK

# Bytes of randomness: as long as the HMAC-SHA256 key that is derived from it.
SECRET_BYTES = 32
# Long enough for ssh with a slow name service, and for Python's start on a cold file system.
START_TIMEOUT_S = 60.0
# Practically forever, but within the limit of the operating system's waits (2**31 ms).
LONGEST_START_S = 1e6
# Time for a restarted task to answer again. A busy host is slow to import a backend.
RETURN_TIMEOUT_S = 120.0


def new_identity() -> tuple[str, str]:
    """Generate the secret and the id of a new job."""
    return secrets.token_hex(SECRET_BYTES), secrets.token_hex(8)


def check_start_timeout(start_timeout_s: float | None) -> float | None:
    """Check the seconds that hosts and tasks wait for each other at the start; None means the default.

    Raises: ConfigurationError if it is not a number above 0.
    """
    if start_timeout_s is None:
        return None
    if not isinstance(start_timeout_s, numbers.Real) or not start_timeout_s > 0:
        raise ConfigurationError(f"start_timeout_s is {start_timeout_s!r}; give a number of seconds above 0.")
    return min(float(start_timeout_s), LONGEST_START_S)


def task_names(workers: int, *, chief: bool = False, servers: int = 0, evaluator: bool = False) -> list[str]:
    """Names of the tasks of a job: those that train, in rank order, then parameter servers and the evaluator.

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
class WorkerTemplate:
    """The settings that the workers of a job have in common.

    Attributes:
        arguments: The program's command line, as after `python`.
        tasks: See `task_names`.
        config: Backend, start timeout and preemption signal of the workers.
        interpreter: Options of the Python interpreter, which precede `arguments`.
        function: Pickled function to run instead of a program.
        restartable: Whether a killed task may be restarted at its port.
        coordinator: Address of the elastic coordinator; None for a job of fixed size.
        identity: The secret and the id of the job.
        run: Value of PHALANX_RUN; None outside of `phalanx run`.
        prints_errors: See `WorkerSpec`.
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
        """Placement of the task of this rank on a host.

        Args:
            addresses: `host:port` of every task, by rank.
            slot: See `WorkerSpec`.
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
    host_specs: Sequence[HostSpec],
    template: WorkerTemplate,
    selector: selectors.BaseSelector,
    streams: OutputStreams,
    show_line: Callable[[str], None],
) -> list[WorkerPlacement]:
    """Connect to the hosts and place the tasks on them, without starting any.

    Args:
        host_specs: The hosts, with one slot for each task, in order.
        template: Settings that the tasks have in common.
        selector: Wakes when a host has something to report.
        streams: Output streams for workers on this host.
        show_line: See `SSHHost`.

    Raises: RendezvousError or ConfigurationError if another host cannot take part.
    """
    hosts: list[LocalHost | SSHHost] = []
    try:
        for host_spec in host_specs:
            host = (
                LocalHost(selector, streams=streams)
                if host_spec.is_local
                else SSHHost(selector, host_spec, show_line=show_line)
            )
            hosts.append(host)
            if isinstance(host, SSHHost):
                host.connect()  # in parallel, so that the total time is that of the slowest host
        addresses: list[str] = []
        owners: list[WorkerHost] = []
        deadline = time.monotonic() + (template.config.start_timeout_s or START_TIMEOUT_S)
        for host_spec, host in zip(host_specs, hosts, strict=True):
            name = LOOPBACK if host_spec.is_loopback else host_spec.name
            if isinstance(host, SSHHost):
                ports = host.ports(deadline)
            else:
                host.name = host_spec.name
                ports = host.prepare(host_spec.workers, address=name)
            addresses += [f"{name}:{port}" for port in ports]
            owners += [host] * host_spec.workers
    except BaseException:
        for host in hosts:
            host.close()
        raise
    return [template.placement(rank, addresses, host) for rank, host in enumerate(owners)]
