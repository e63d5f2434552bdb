"""Connections to the hosts of an elastic job: opens, grows, drops and closes them.

Threads wait for other hosts to answer; everything else happens in the thread that runs the job. The waiting threads
pass their results to `post`, which runs functions in that thread.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from phalanx.errors import PhalanxError
from phalanx.launcher.elastic_hosts.host_blacklist import HostBlacklist
from phalanx.launcher.host_event_loop import HostEventLoop
from phalanx.launcher.host_slots import HostSpec
from phalanx.launcher.hosts.local_host import LocalHost
from phalanx.launcher.hosts.output_streams import OutputStreams
from phalanx.launcher.hosts.ssh_host import SSHHost
from phalanx.launcher.worker_placement import START_TIMEOUT_S
from phalanx.transport.address import LOOPBACK

CLOSE_S = 5.0


@dataclass
class HostConnection:
    """A connection to a host, perhaps not answered yet.

    Attributes:
        host_spec: The host and its number of workers.
        host: Starts the workers.
        name: Name or address at which other hosts reach it.
        requested: Number of ports requested from it. Never decreases, so that a slot offered again keeps its port.
        ports: A port for each slot; None until the host has answered.
        waiter: Thread that waits for the answer.
    """

    host_spec: HostSpec
    host: LocalHost | SSHHost
    name: str
    requested: int
    ports: list[int] | None = None
    waiter: threading.Thread | None = None

    def address(self, slot: int) -> str:
        assert self.ports is not None
        return f"{self.name}:{self.ports[slot]}"

    def grow(self, slots: int) -> None:
        """Add slots if the host offers more than before. On a remote host, they arrive later."""
        if self.ports is None:
            return
        if isinstance(self.host, SSHHost):
            self.ports += self.host.new_ports
            self.host.new_ports.clear()
        more = slots - self.requested
        if more > 0:
            self.requested += more
            if isinstance(self.host, SSHHost):
                self.host.grow(more)
            else:
                self.ports += self.host.prepare(more, address=self.name)

    def close(self) -> None:
        if self.waiter is not None and isinstance(self.host, SSHHost):
            if self.ports is None:
                self.host.abandon()
            self.waiter.join(CLOSE_S)  # before the close: the thread uses the host
        self.host.close()


class HostConnections:
    """See the module docstring.

    Args:
        selector: Wakes the launcher when a host has sent something.
        streams: Output streams for local workers.
        start_timeout_s: Seconds to wait for a host.
        log: Shows a line.
        on_host_line: Shows a line that a host has sent, which includes its name.
        post: Runs a function in the thread that runs the job. Thread-safe.

    Attributes:
        blacklist: Hosts that are temporarily not used.
        error: The first error of a connection attempt.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        streams: OutputStreams,
        *,
        start_timeout_s: float | None,
        blacklist: HostBlacklist,
        log: Callable[[str], None],
        on_host_line: Callable[[str], None],
        post: Callable[[Callable[[], None]], None],
    ):
        self._selector, self._streams = selector, streams
        self._start_timeout_s = start_timeout_s or START_TIMEOUT_S
        self._log, self._on_host_line, self._post = log, on_host_line, post
        self.blacklist = blacklist
        self.error: Exception | None = None
        self._connections: dict[str, HostConnection] = {}  # by host name; includes those that have not answered
        self._loop: HostEventLoop | None = None  # of the job, once it has started

    def attach(self, loop: HostEventLoop) -> None:
        """Add the hosts that have answered, and those that answer later, to the loop of the started job."""
        self._loop = loop
        for name in self.names:
            if connection := self.ready(name):
                loop.add(connection.host)

    @property
    def names(self) -> list[str]:
        """Names of the hosts that are connected or being connected."""
        return list(self._connections)

    @property
    def is_waiting(self) -> bool:
        """Whether a host has not answered yet."""
        return any(connection.ports is None for connection in self._connections.values())

    def ready(self, name: str) -> HostConnection | None:
        """The connection to a host if it has answered."""
        connection = self._connections.get(name)
        return None if connection is None or connection.ports is None else connection

    def usable_slots(self, name: str) -> int:
        """Number of slots of a host that can be used now."""
        connection = self.ready(name)
        if connection is None or connection.host.lost or self.blacklist.is_blacklisted(name, time.monotonic()):
            return 0
        return len(connection.ports or ())

    def connect(self, host_spec: HostSpec, *, name: str, slots: int, loopback: bool) -> None:
        """Connect to a host, unless it is blacklisted.

        Args:
            host_spec: The host.
            name: Name or address at which other hosts reach it.
            slots: Number of ports to request.
            loopback: Whether only processes on this host need to reach its workers.
        """
        if self.blacklist.is_blacklisted(host_spec.name, time.monotonic()):
            return
        if host_spec.is_local:
            local = LocalHost(self._selector, streams=self._streams)
            local.name = host_spec.name
            connection = self._connections[host_spec.name] = HostConnection(host_spec, local, name, slots)
            self._answered(connection, local.prepare(slots, address=LOOPBACK if loopback else name))
            return
        remote = SSHHost(self._selector, host_spec, show_line=lambda text: self._post(lambda: self._on_host_line(text)))
        remote.host_spec = replace(host_spec, workers=slots)
        connection = self._connections[host_spec.name] = HostConnection(host_spec, remote, name, slots)
        try:
            remote.connect()
        except (PhalanxError, OSError) as error:
            failure = error
            self._post(lambda: self._failed(connection, failure))
            return
        connection.waiter = threading.Thread(
            target=self._await_ports, args=(connection, remote), name=f"phalanx-host-{host_spec.name}", daemon=True
        )
        connection.waiter.start()

    def update(self, offered: Mapping[str, HostSpec], now: float) -> None:
        """Close lost connections and add new slots.

        Args:
            offered: Hosts on which workers may run, by name.
            now: Seconds of the monotonic clock.
        """
        for name, connection in list(self._connections.items()):
            if connection.host.lost:
                seconds = self.blacklist.unreachable(name, now)
                again = f"; next attempt in {seconds:g} s" if name in offered else ""
                self._log(f"{name} is lost: the connection has ended{again}")
                self.close([name])
            elif name in offered:
                connection.grow(offered[name].workers)

    def close(self, names: Iterable[str]) -> None:
        """Close the connections to these hosts."""
        for name in list(names):
            connection = self._connections.pop(name)
            if self._loop is not None:
                self._loop.remove(connection.host)
            connection.close()

    def _await_ports(self, connection: HostConnection, host: SSHHost) -> None:
        try:
            ports = host.ports(time.monotonic() + self._start_timeout_s)
        except (PhalanxError, OSError) as error:
            failure = error
            self._post(lambda: self._failed(connection, failure))
            return
        self._post(lambda: self._answered(connection, ports))

    def _answered(self, connection: HostConnection, ports: list[int]) -> None:
        if self._connections.get(connection.host_spec.name) is connection:  # otherwise it was closed in the meantime
            connection.ports = ports
            if self._loop is not None:
                self._log(f"{connection.host_spec.name} joined with {connection.host_spec.workers} slots")
                self._loop.add(connection.host)

    def _failed(self, connection: HostConnection, error: Exception) -> None:
        name = connection.host_spec.name
        if self._connections.get(name) is connection:
            seconds = self.blacklist.unreachable(name, time.monotonic())
            self._log(f"{name} cannot take part: {error} Next attempt in {seconds:g} s.")
            self.error = self.error or error
            self.close([name])
