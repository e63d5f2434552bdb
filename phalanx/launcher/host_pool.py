"""The hosts of an elastic job: connected, filled with workers, set aside, given back.

What is decided stands in `roster` (who sits where) and `standing` (which hosts are set aside); here are the
connections. Everything happens in the thread that runs the job, but waiting: for other hosts to answer, and for the
discovery script. Those threads leave *news*, which the next `update` handles.
"""

from __future__ import annotations

import queue
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from phalanx.config.variables import DEFAULT_RENDEZVOUS_TIMEOUT_S
from phalanx.errors import PhalanxError, RendezvousError
from phalanx.launcher.host_blacklist import COOLDOWN_S, HostBlacklist
from phalanx.launcher.host_discovery import HostDiscovery
from phalanx.launcher.host_slots import HostShare, own_name
from phalanx.launcher.hosts.base import WorkerPlacement
from phalanx.launcher.hosts.local_host import LocalHost, OutputStreams
from phalanx.launcher.hosts.ssh_host import SSHHost
from phalanx.launcher.job_supervisor import JobSupervisor
from phalanx.launcher.slot_assignment import HostSlot, SlotAssignment
from phalanx.launcher.worker_placement import LOOPBACK, NO_REPLICA, START_TIMEOUT_S, WorkerRecipe

if TYPE_CHECKING:
    from phalanx.elastic.control_messages import HostState
    from phalanx.elastic.launcher_interface import MembershipControl

GATHER_POLL_S = 0.5
CLOSE_S = 5.0
VACANT = "vacant-{}.invalid:1"
"""The address of a worker that has none: TF_CONFIG names all, and in elastic jobs nobody dials by it."""


@dataclass(frozen=True)
class DiscoveryScript:
    """A host discovery script.

    Attributes:
        command: as for a shell.
        slots: of a host that is printed without their number.
        every_s, timeout_s: seconds between two questions, and for an answer.
    """

    command: str
    slots: int
    every_s: float
    timeout_s: float


@dataclass
class _Connection:
    """A host that takes part, or is about to. `ports` is None until it has answered; `asked` counts those to come."""

    share: HostShare
    host: LocalHost | SSHHost
    name: str
    asked: int
    ports: list[int] | None = None
    waiter: threading.Thread | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Found:
    shares: list[HostShare]


@dataclass(frozen=True)
class _Answered:
    connection: _Connection
    ports: list[int] | Exception


@dataclass(frozen=True)
class _Said:
    text: str


@dataclass(frozen=True)
class _Relayed:
    text: str


class HostPool:
    """See the top of this file. `gather`, then `first`, then `begin`; a context manager.

    Args:
        tasks: of the job, those that train first.
        minimum: of workers.
        begin: so many slots are waited for, if the script names as many in time; None: the minimum.
        shares: the hosts, if they are known; else `script` tells them.
        start_timeout_s: for the hosts at the start; None: a minute, and five for a script's first ones.
        cooldown_s: see `HostBlacklist`.
        say: shows a line.
        relay: shows what a host says, which names it.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        selector: selectors.BaseSelector,
        streams: OutputStreams,
        *,
        minimum: int,
        begin: int | None = None,
        shares: Sequence[HostShare] | None,
        script: DiscoveryScript | None = None,
        start_timeout_s: float | None = None,
        cooldown_s: tuple[float, float] = COOLDOWN_S,
        say: Callable[[str], None],
        relay: Callable[[str], None],
    ):
        self._tasks = tasks
        self._others = [rank for rank, task in enumerate(tasks) if task.startswith(NO_REPLICA)]
        self._minimum = minimum
        self._enough = begin or minimum
        self._selector, self._streams = selector, streams
        self._start_timeout_s = start_timeout_s
        self._say, self._relay = say, relay
        self._news: queue.SimpleQueue[_Found | _Answered | _Said | _Relayed] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._roster = SlotAssignment(
            [rank for rank in range(len(tasks)) if rank not in self._others], len(tasks) - len(self._others)
        )
        self._standing = HostBlacklist(cooldown_s)
        self._shares: dict[str, HostShare] = {}
        self._connections: dict[str, _Connection] = {}
        self._error: Exception | None = None
        self._fixed_addresses: dict[int, str] = {}  # of those that do not train
        self._recipe: WorkerRecipe | None = None
        self._job: JobSupervisor | None = None
        self._membership: MembershipControl | None = None
        self._shown: tuple[HostState, ...] = ()
        self._fixed = script is None
        self._discovery: HostDiscovery | None = None
        if script is not None:
            self._discovery = HostDiscovery(
                script.command,
                slots=script.slots,
                every_s=script.every_s,
                timeout_s=script.timeout_s,
                found=lambda shares: self._tell(_Found(shares)),
                say=lambda text: self._tell(_Said(text)),
            )
        self._take(_Found(list(shares or ())))

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def shares(self) -> list[HostShare]:
        """The hosts that are known."""
        return list(self._shares.values())

    @property
    def stays_here(self) -> bool:
        """Whether no worker will ever run on another host."""
        return self._fixed and all(share.is_loopback for share in self.shares)

    # Before the job.

    def gather(self) -> None:
        """Connect to the hosts, until there are slots enough to begin.

        Raises: RendezvousError, ConfigurationError or OSError if there are not, in time.
        """
        patience_s = START_TIMEOUT_S if self._fixed else DEFAULT_RENDEZVOUS_TIMEOUT_S
        deadline = time.monotonic() + (self._start_timeout_s or patience_s)
        if self._discovery is not None:
            self._discovery.start()
        while True:
            self._connect(time.monotonic())
            waiting = any(connection.ports is None for connection in self._connections.values())
            if not waiting and self._slots >= self._enough:
                return
            if self._fixed and not waiting:
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                self._take(self._news.get(timeout=min(GATHER_POLL_S, left_s)))
            except queue.Empty:
                continue
        if self._slots >= self._minimum:
            return  # without those that still have not come
        if self._error is not None:
            raise self._error
        problem = "" if self._discovery is None else self._discovery.problem
        raise RendezvousError(
            f"{self._slots} slots were found in time, and {self._minimum} are needed"
            + (f"; of the host discovery script: {problem}" if problem else "")
            + ". --start-timeout allows more time."
        )

    def first(self, recipe: WorkerRecipe) -> list[WorkerPlacement]:
        """The workers with which the job begins, and its other tasks."""
        self._recipe = recipe
        placed = self._roster.fill(self._usable)
        placements: list[WorkerPlacement] = []
        if self._others:
            last = self._connections.get(self.shares[-1].name)
            if last is None or last.ports is None:
                raise self._error or RendezvousError(f"{self.shares[-1].name} did not answer in time.")
            slots = range(len(last.ports) - len(self._others), len(last.ports))
            self._fixed_addresses = {
                rank: f"{last.name}:{last.ports[slot]}" for rank, slot in zip(self._others, slots, strict=True)
            }
            placements += [
                recipe.placement(rank, self._addresses(), last.host, slot)
                for rank, slot in zip(self._others, slots, strict=True)
            ]
        return [*(self._placement(rank, slot) for rank, slot in placed), *placements]

    def begin(self, job: JobSupervisor, membership: MembershipControl) -> None:
        """The job has been started."""
        self._job, self._membership = job, membership
        self._wake = job.loop.wake
        for connection in self._connections.values():
            if connection.ports is not None:
                job.loop.add(connection.host)
        self._wake()

    def close(self) -> None:
        """Hang up, and stop asking. Safe to call twice."""
        if self._discovery is not None:
            self._discovery.close()
        for connection in self._connections.values():
            self._hang_up(connection)
        self._connections.clear()

    # What the job asks (`SlotProvider`).

    def worker_exited(self, rank: int, *, failed: bool) -> bool:
        """See `SlotProvider.worker_exited`."""
        slot = self._roster.slot(rank)
        if slot is None:
            return False
        connection = self._connections.get(slot.host)
        if failed and connection is not None and not connection.host.lost and self._is_one_of_several(slot.host):
            seconds = self._standing.failed(slot.host, time.monotonic())
            if seconds is not None:
                reason = self._standing.aside(time.monotonic())[slot.host].reason
                self._say(f"{slot.host} is set aside for {seconds:g} s: {reason}")
        if failed and self._roster.stays(rank) and self._usable(slot.host):
            return True
        self._roster.leave(rank)
        return False

    def retire(self, rank: int) -> None:
        """See `SlotProvider.retire`."""
        self._roster.retire(rank)
        if self._membership is not None:
            self._membership.limit(self._roster.seats)

    def set_target(self, workers: int) -> None:
        """See `SlotProvider.set_target`."""
        self._roster.wanted = workers

    def update(self) -> float | None:
        """See `SlotProvider.update`."""
        now = time.monotonic()
        while not self._news.empty():
            self._take(self._news.get())
        self._drop_lost(now)
        for name in self._roster.left_behind(self._connections):
            self._hang_up(self._connections.pop(name))
        self._connect(now)
        self._grow()
        self._send_away()
        self._seat()
        self._show(now)
        waits = [aside.seconds for name, aside in self._standing.aside(now).items() if name in self._shares]
        return min(waits, default=None)

    # Inside.

    def _tell(self, news: _Found | _Answered | _Said | _Relayed) -> None:
        self._news.put(news)
        self._wake()

    def _take(self, news: _Found | _Answered | _Said | _Relayed) -> None:
        match news:
            case _Found(shares):
                most = len(self._tasks)  # more are of no use, and each costs a socket
                shares = [replace(share, workers=min(share.workers, most)) for share in shares]
                self._shares = {share.name: share for share in shares}
                self._roster.offer({share.name: share.workers for share in shares})
                if self._job is not None:
                    names = ", ".join(f"{share.name}:{share.workers}" for share in shares) or "none"
                    self._say(f"the hosts are now: {names}")
            case _Answered(connection, ports):
                self._answered(connection, ports)
            case _Said(text):
                self._say(text)
            case _Relayed(text):
                self._relay(text)

    @property
    def _slots(self) -> int:
        return sum(min(share.workers, self._usable(share.name)) for share in self.shares)

    def _usable(self, name: str) -> int:
        """How many slots of a host can be used now."""
        connection = self._connections.get(name)
        if connection is None or connection.host.lost or self._standing.is_aside(name, time.monotonic()):
            return 0
        return len(connection.ports or ())

    def _is_one_of_several(self, name: str) -> bool:
        """Whether there is another host to go to: it would help nobody to set the only one aside."""
        return any(self._usable(other) for other in self._shares if other != name)

    def _connect(self, now: float) -> None:
        for share in self._shares.values():
            if share.name not in self._connections and not self._standing.is_aside(share.name, now):
                self._connect_to(share)

    def _connect_to(self, share: HostShare) -> None:
        own = share.is_here
        host: LocalHost | SSHHost
        if own:
            host = LocalHost(self._selector, streams=self._streams)
        else:
            host = SSHHost(self._selector, share, say=lambda text: self._tell(_Relayed(text)))
        name = share.name
        if share.is_loopback:
            name = LOOPBACK if self._fixed else own_name([other for other in self.shares if not other.is_here])
        slots = share.workers
        if self._fixed and share is self.shares[-1]:
            slots += len(self._others)
        connection = self._connections[share.name] = _Connection(share, host, name, slots)
        if isinstance(host, LocalHost):
            host.name = share.name
            connection.ports = host.prepare(slots, address=LOOPBACK if self._fixed and share.is_loopback else None)
            self._watch(connection)
            return
        host.share = HostShare(share.name, slots, share.user)
        deadline = time.monotonic() + (self._start_timeout_s or START_TIMEOUT_S)
        try:
            host.connect()
        except (PhalanxError, OSError) as error:
            self._tell(_Answered(connection, error))
            return
        connection.waiter = threading.Thread(
            target=self._wait_for, args=(connection, host, deadline), name=f"phalanx-host-{share.name}", daemon=True
        )
        connection.waiter.start()

    def _wait_for(self, connection: _Connection, host: SSHHost, deadline: float) -> None:
        try:
            ports: list[int] | Exception = host.ports(deadline)
        except (PhalanxError, OSError) as error:
            ports = error
        self._tell(_Answered(connection, ports))

    def _answered(self, connection: _Connection, ports: list[int] | Exception) -> None:
        name = connection.share.name
        if self._connections.get(name) is not connection:
            return  # it was given up meanwhile
        if isinstance(ports, Exception):
            seconds = self._standing.unreachable(name, time.monotonic())
            self._say(f"{name} takes no part: {ports} It is tried again in {seconds:g} s.")
            self._error = self._error or ports
            self._hang_up(self._connections.pop(name))
            return
        connection.ports = ports
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        if self._job is not None:
            self._say(f"{connection.share.name} takes part now, with {connection.share.workers} slots")
            self._job.loop.add(connection.host)

    def _drop_lost(self, now: float) -> None:
        for name, connection in list(self._connections.items()):
            if connection.host.lost:
                offered = name in self._shares
                seconds = self._standing.unreachable(name, now)
                again = f"; it is tried again in {seconds:g} s" if offered else ""
                self._say(f"{name} is lost: the connection has ended{again}")
                self._hang_up(self._connections.pop(name))

    def _hang_up(self, connection: _Connection) -> None:
        if self._job is not None:
            self._job.loop.remove(connection.host)
        if connection.waiter is not None and isinstance(connection.host, SSHHost):
            if connection.ports is None:
                connection.host.abandon()
            connection.waiter.join(CLOSE_S)
        connection.host.close()

    def _grow(self) -> None:
        """A host may have got more slots."""
        for name, connection in self._connections.items():
            ports = connection.ports
            if ports is None or name not in self._shares:
                continue
            if isinstance(connection.host, SSHHost):
                ports += connection.host.new_ports
                connection.host.new_ports.clear()
            more = self._shares[name].workers - connection.asked
            if more > 0:
                connection.asked += more
                if isinstance(connection.host, SSHHost):
                    connection.host.grow(more)
                else:
                    ports += connection.host.prepare(more, address=None)

    def _send_away(self) -> None:
        membership = self._membership
        if membership is None:
            return
        for rank in self._roster.send_away():
            slot = self._roster.slot(rank)
            self._say(f"{self._tasks[rank]} is to leave before a next step: {slot.host if slot else ''} is taken back")
            membership.withdraw(self._tasks[rank])

    def _seat(self) -> None:
        """Start workers where there is room."""
        job, membership = self._job, self._membership
        if job is None or membership is None or not job.accepts_workers:
            return
        for rank, slot in self._roster.fill(self._usable):
            self._say(f"{self._tasks[rank]} starts on {slot.host}")
            membership.readmit(self._tasks[rank])
            job.start_worker(self._placement(rank, slot))

    def _placement(self, rank: int, slot: HostSlot) -> WorkerPlacement:
        assert self._recipe is not None
        return self._recipe.placement(rank, self._addresses(), self._connections[slot.host].host, slot.number)

    def _addresses(self) -> list[str]:
        """Of all tasks, as far as they have one."""
        addresses = []
        for rank in range(len(self._tasks)):
            slot = self._roster.slot(rank)
            connection = None if slot is None else self._connections.get(slot.host)
            if rank in self._fixed_addresses:
                addresses.append(self._fixed_addresses[rank])
            elif slot is not None and connection is not None and connection.ports is not None:
                addresses.append(f"{connection.name}:{connection.ports[slot.number]}")
            else:
                addresses.append(VACANT.format(rank))
        return addresses

    def _show(self, now: float) -> None:
        """Have `phalanx status` know the hosts."""
        if self._membership is None:
            return
        from phalanx.elastic.control_messages import HostState

        aside = self._standing.aside(now)
        states = tuple(
            HostState(
                name=name,
                slots=share.workers,
                taken=len(self._roster.ranks_on(name)),
                blacklisted_until=round(now + aside[name].seconds, 3) if name in aside else None,
                reason=aside[name].reason if name in aside else "",
            )
            for name, share in self._shares.items()
        )
        if states != self._shown:
            self._shown = states
            self._membership.show_hosts(states)
