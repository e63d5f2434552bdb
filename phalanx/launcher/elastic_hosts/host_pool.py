"""Manages the hosts of an elastic job: connects, fills, blacklists and withdraws them.

`slot_assignment` decides which worker runs where, `host_blacklist` which hosts are temporarily not used, and
`host_connections` connects to them. Everything happens in the thread that runs the job, except waiting for other hosts
and for the discovery script. Those threads queue *events*, which the next `update` runs.
"""

from __future__ import annotations

import queue
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phalanx.config.environment_variables import DEFAULT_RENDEZVOUS_TIMEOUT_S
from phalanx.config.task_names import trains
from phalanx.errors import ConfigurationError, RendezvousError
from phalanx.launcher.elastic_hosts.host_blacklist import COOLDOWN_S, HostBlacklist
from phalanx.launcher.elastic_hosts.host_connections import HostConnection, HostConnections
from phalanx.launcher.elastic_hosts.host_discovery import DiscoveryScript, HostDiscovery
from phalanx.launcher.elastic_hosts.slot_assignment import HostSlot, SlotAssignment
from phalanx.launcher.host_slots import HostSpec, find_local_name
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.launcher.hosts.output_streams import OutputStreams
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.job_supervisor import JobSupervisor
from phalanx.launcher.worker_placement import START_TIMEOUT_S, WorkerTemplate
from phalanx.monitoring.job_events import HostStatus
from phalanx.transport.address import LOOPBACK

if TYPE_CHECKING:
    from phalanx.elastic.coordinator_server import CoordinatorServer

HOST_POLL_S = 0.5
NO_ADDRESS = "vacant-{}.invalid:1"
"""Placeholder address of a task without one: TF_CONFIG lists all tasks, but elastic jobs do not use its addresses."""


@dataclass(frozen=True)
class ElasticOptions:
    """Size and hosts of an elastic job.

    Attributes:
        minimum, maximum: Bounds on the number of workers. Below the minimum, the job waits.
        initial_workers: Number of workers to start with if there are enough slots in time; None: the minimum, or as
            many as fit.
        script: Script that discovers the hosts; None: the hosts are given.
        cooldown_s: See `HostBlacklist`.
    """

    minimum: int
    maximum: int
    initial_workers: int | None = None
    script: DiscoveryScript | None = None
    cooldown_s: tuple[float, float] = COOLDOWN_S


class ElasticPlacements:
    """Places the tasks of an elastic job: workers in their assigned slots, an evaluator on the last host.

    Args:
        tasks: All tasks of the job, those that train first.
        slots: Slots of the workers.
        connections: Connections to the hosts.

    Attributes:
        extra_slots: Number of slots that the last host needs for the evaluator.
        template: Settings that the tasks have in common. Set before the first placement.
    """

    def __init__(self, tasks: Sequence[str], slots: SlotAssignment, connections: HostConnections):
        self._tasks, self._slots, self._connections = tasks, slots, connections
        self.extra_slots = sum(not trains(task) for task in tasks)
        self._evaluator_address: str | None = None
        self.template: WorkerTemplate | None = None

    def worker(self, rank: int, slot: HostSlot) -> WorkerPlacement:
        connection = self._connections.ready(slot.host)
        assert connection is not None
        return self._place(rank, connection, slot.number)

    def drop_vacant_tasks(self) -> None:
        """Drop the tasks without a slot: they never start, and no other task is to expect them."""
        assert self.template is not None
        self._tasks = [
            task for rank, task in enumerate(self._tasks) if not trains(task) or self._slots.slot(rank) is not None
        ]
        self.template = replace(self.template, tasks=self._tasks)

    def evaluator(self, host: str) -> list[WorkerPlacement]:
        """Placement of the evaluator, if the job has one.

        Raises: RendezvousError or the error of the connection if the host has not answered.
        """
        if not self.extra_slots:
            return []
        connection = self._connections.ready(host)
        if connection is None or connection.ports is None:
            raise self._connections.error or RendezvousError(f"{host} did not answer in time.")
        slot = len(connection.ports) - 1
        self._evaluator_address = connection.address(slot)
        return [self._place(len(self._tasks) - 1, connection, slot)]

    def _place(self, rank: int, connection: HostConnection, slot: int) -> WorkerPlacement:
        assert self.template is not None
        addresses = [self._address(each) for each in range(len(self._tasks))]
        return self.template.placement(rank, addresses, connection.host, slot)

    def _address(self, rank: int) -> str:
        slot = self._slots.slot(rank)
        if slot is not None and (connection := self._connections.ready(slot.host)):
            return connection.address(slot.number)
        is_evaluator = not trains(self._tasks[rank])
        return (is_evaluator and self._evaluator_address) or NO_ADDRESS.format(rank)


class HostPool:
    """See the module docstring. Call `wait_for_hosts`, then `first_placements`, then `attach`, and `close` at the end.

    Args:
        tasks: Tasks of the job, those that train first.
        selector: Wakes the launcher when a host has sent something.
        streams: Output streams for local workers.
        options: Size of the job and source of its hosts.
        host_specs: The hosts, unless a script discovers them.
        start_timeout_s: Seconds to wait for the hosts at the start; None: one minute, or five minutes for the first
            hosts of a script.
        observer: Receives the changes of the hosts.
        on_host_line: Shows a line that a host has sent, which includes its name.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        selector: selectors.BaseSelector,
        streams: OutputStreams,
        options: ElasticOptions,
        *,
        host_specs: Sequence[HostSpec],
        start_timeout_s: float | None = None,
        observer: JobObserver,
        on_host_line: Callable[[str], None],
    ):
        self._tasks, self._options, self._log, self._on_hosts = tasks, options, observer.message, observer.hosts_changed
        self._drained: set[str] = set()  # hosts that stay withdrawn even if the discovery script lists them
        self._start_timeout_s = start_timeout_s
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._connections = HostConnections(
            selector,
            streams,
            start_timeout_s=start_timeout_s,
            blacklist=HostBlacklist(options.cooldown_s),
            log=self._log,
            on_host_line=on_host_line,
            post=self._post,
        )
        trained = [rank for rank, task in enumerate(tasks) if trains(task)]
        self._slots = SlotAssignment(trained, len(trained))
        self._placements = ElasticPlacements(tasks, self._slots, self._connections)
        self._host_specs: dict[str, HostSpec] = {}  # replaced, never modified: `drain` reads it in another thread
        self._job: JobSupervisor | None = None
        self._membership: CoordinatorServer | None = None
        self._shown: list[HostStatus] = []
        self._discovery: HostDiscovery | None = None
        if (script := options.script) is not None:
            self._discovery = HostDiscovery(
                script,
                on_change=lambda hosts: self._post(lambda: self._set_hosts(hosts)),
                log=lambda text: self._post(lambda: self._log(text)),
            )
        else:
            self._set_hosts(host_specs)

    @property
    def host_specs(self) -> list[HostSpec]:
        """The hosts that may be used."""
        return [host_spec for name, host_spec in self._host_specs.items() if name not in self._drained]

    @property
    def is_local_only(self) -> bool:
        """Whether no worker will ever run on another host."""
        return self._discovery is None and all(host_spec.is_loopback for host_spec in self.host_specs)

    # Before the job.

    def wait_for_hosts(self) -> None:
        """Connect to the hosts until there are enough slots to begin.

        Raises: RendezvousError, ConfigurationError or OSError if there are too few in time.
        """
        minimum, enough = self._options.minimum, self._options.initial_workers or self._options.minimum
        patience_s = START_TIMEOUT_S if self._discovery is None else DEFAULT_RENDEZVOUS_TIMEOUT_S
        deadline = time.monotonic() + (self._start_timeout_s or patience_s)
        if self._discovery is not None:
            self._discovery.start()
        while True:
            self._connect()
            slots = sum(
                min(host_spec.workers, self._connections.usable_slots(host_spec.name)) for host_spec in self.host_specs
            )
            # Without a script, no other host can appear. With one, wait until it lists enough hosts.
            if not self._connections.is_waiting and (slots >= enough or self._discovery is None):
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                self._events.get(timeout=min(HOST_POLL_S, left_s))()
            except queue.Empty:
                continue
        if slots >= minimum:
            return  # begin without the hosts that have not answered
        if self._connections.error is not None:
            raise self._connections.error
        problem = "" if self._discovery is None else self._discovery.problem
        raise RendezvousError(
            f"{slots} slots were found in time, and {minimum} are needed"
            + (f"; of the host discovery script: {problem}" if problem else "")
            + ". --start-timeout allows more time."
        )

    def first_placements(self, template: WorkerTemplate, *, is_fixed: bool = False) -> list[WorkerPlacement]:
        """Placements of the initial workers and of the other tasks.

        Args:
            is_fixed: Whether no worker starts later.
        """
        self._placements.template = template
        assigned = self._slots.assign(self._connections.usable_slots)
        if is_fixed:
            self._placements.drop_vacant_tasks()
        evaluator = self._placements.evaluator(self.host_specs[-1].name) if self.host_specs else []
        return [*(self._placements.worker(rank, slot) for rank, slot in assigned), *evaluator]

    def attach(self, job: JobSupervisor, membership: CoordinatorServer) -> None:
        """Attach the pool to a job that has started."""
        self._job, self._membership = job, membership
        self._connections.attach(job.loop)
        job.loop.wake()  # for events that were posted before `_post` had the loop

    def drain(self, host: str) -> None:
        """Withdraw a host: its workers leave before the next step, and no worker starts there. Thread-safe.

        Raises: ConfigurationError if the host is unknown, or if too few slots would be left.
        """
        names = [host_spec.name for host_spec in self.host_specs]
        if host not in names:
            raise ConfigurationError(f"{host!r} is not a host of the job; its hosts are {', '.join(names)}.")
        slots = sum(host_spec.workers for host_spec in self.host_specs if host_spec.name != host)
        if slots < self._options.minimum:
            raise ConfigurationError(
                f"Without {host} the job has {slots} slots, and needs {self._options.minimum}. Add a host first."
            )

        # Here, not in the event: the next request may arrive before the job's thread runs it.
        self._drained.add(host)
        self._post(lambda: self._set_hosts(list(self._host_specs.values())))

    def close(self) -> None:
        """Close all connections, and stop the discovery script. Safe to call twice."""
        if self._discovery is not None:
            self._discovery.close()
        self._connections.close(self._connections.names)

    # Called by the job, in the thread that runs it.

    def task_failed(self, task: str) -> None:
        """Handle the failure of a task's process. Called before its restart is decided."""
        # Closed links reveal most exits too, but not if the network or the power of a host is cut.
        if self._membership is not None:
            self._membership.lose(task)

    def has_left_early(self, task: str) -> bool:
        """Whether the process of a task, which exited with code 0, left in the middle of the training."""
        return self._membership is not None and self._membership.has_left_early(task)

    def keep_or_free_slot(self, rank: int, *, failed: bool) -> bool:
        """Handle the exit of a worker that may run again. Return whether it can be restarted in its slot; otherwise its
        slot is freed and it waits for another one."""
        slot, now = self._slots.slot(rank), time.monotonic()
        if slot is None:
            return False
        # The only host is not blacklisted, since no other could replace it.
        others = any(self._connections.usable_slots(name) for name in self._host_specs if name != slot.host)
        connection = self._connections.ready(slot.host)
        if failed and connection is not None and not connection.host.lost and others:
            blacklisted = self._connections.blacklist.worker_failed(slot.host, now)
            if blacklisted is not None:
                self._log(f"{slot.host} is blacklisted for {blacklisted.seconds:g} s: {blacklisted.reason}")
        # True: it restarts in its slot, at the same port. Not on a host that is lost, blacklisted or withdrawn:
        # `update` then starts it in a free slot.
        if failed and self._slots.keeps_slot(rank) and self._connections.usable_slots(slot.host):
            return True
        self._slots.free(rank)
        return False

    def retire(self, rank: int) -> None:
        """Handle the final exit of a worker."""
        self._slots.retire(rank)
        if self._membership is not None:
            self._membership.limit_processes(self._slots.max_workers)

    def set_target(self, workers: int) -> None:
        """Set the desired number of workers."""
        self._slots.target = workers

    def update(self) -> float | None:
        """Apply pending changes and start workers in free slots. Called after every event. Return the seconds until the
        next call is due; None if none is."""
        now = time.monotonic()
        while not self._events.empty():
            self._events.get()()
        self._connections.update({host_spec.name: host_spec for host_spec in self.host_specs}, now)
        self._connections.close(self._slots.unused_hosts(self._connections.names))
        self._connect()
        if self._membership is not None:
            self._withdraw(self._membership)
            self._start_workers(self._membership)
            self._report_hosts(now)
        blacklisted = self._connections.blacklist.hosts(now)
        return min((host.seconds for name, host in blacklisted.items() if name in self._host_specs), default=None)

    # Internals.

    def _post(self, event: Callable[[], None]) -> None:
        """Run a function in the thread that runs the job. Thread-safe."""
        self._events.put(event)
        if self._job is not None:
            self._job.loop.wake()  # an `update` follows

    def _set_hosts(self, host_specs: Sequence[HostSpec]) -> None:
        """Replace the hosts on which workers may run."""
        most = len(self._tasks)  # more slots are useless, and each costs a socket
        host_specs = [replace(host_spec, workers=min(host_spec.workers, most)) for host_spec in host_specs]
        self._host_specs = {host_spec.name: host_spec for host_spec in host_specs}
        self._slots.set_hosts({host_spec.name: host_spec.workers for host_spec in self.host_specs})
        if self._job is not None:
            names = ", ".join(f"{host_spec.name}:{host_spec.workers}" for host_spec in host_specs) or "none"
            self._log(f"the hosts are now: {names}")

    def _connect(self) -> None:
        is_fixed, connected = self._discovery is None, self._connections.names
        for host_spec in self.host_specs:
            name = host_spec.name
            if name in connected:
                continue
            if host_spec.is_loopback:
                name = (
                    LOOPBACK
                    if is_fixed
                    else find_local_name([other for other in self.host_specs if not other.is_local])
                )
            is_last = is_fixed and host_spec is self.host_specs[-1]  # the evaluator runs there
            slots = host_spec.workers + (self._placements.extra_slots if is_last else 0)
            self._connections.connect(host_spec, name=name, slots=slots, loopback=is_fixed and host_spec.is_loopback)

    def _withdraw(self, membership: CoordinatorServer) -> None:
        for rank in self._slots.withdraw():
            slot = self._slots.slot(rank)
            host = slot.host if slot else ""
            self._log(f"{self._tasks[rank]} leaves before the next step: {host} is withdrawn")
            membership.withdraw(self._tasks[rank])

    def _start_workers(self, membership: CoordinatorServer) -> None:
        """Start workers where there are free slots."""
        if self._job is None or not self._job.accepts_workers:
            return
        for rank, slot in self._slots.assign(self._connections.usable_slots):
            self._log(f"{self._tasks[rank]} starts on {slot.host}")
            membership.readmit(self._tasks[rank])  # before it starts, or it would leave again as a withdrawn task
            self._job.start_worker(self._placements.worker(rank, slot))

    def _report_hosts(self, now: float) -> None:
        """Report the hosts if they have changed."""
        blacklisted = self._connections.blacklist.hosts(now)
        states = []  # includes drained hosts
        for name, host_spec in self._host_specs.items():
            host = blacklisted.get(name)
            # Rounded, so that the time between two calls does not make an unchanged state look new.
            until, reason = (None, "") if host is None else (round(time.time() + host.seconds), host.reason)
            taken = len(self._slots.ranks_on(name))
            states.append(HostStatus(name, host_spec.workers, taken, until, reason, name in self._drained))
        if states != self._shown:
            self._shown = states
            self._on_hosts(states)
