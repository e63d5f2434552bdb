"""Runs workers on another host through ssh and an agent there."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import REMOTE_PYTHON
from phalanx.errors import ConfigurationError, RendezvousError
from phalanx.launcher.host_messages import (
    Command,
    DumpStacks,
    Event,
    Exited,
    Prepare,
    Prepared,
    Refused,
    RequestCheckpoint,
    Restart,
    Signal,
    Start,
    WorkerDiagnostics,
    WorkerSpec,
)
from phalanx.launcher.host_slots import HostSpec
from phalanx.launcher.hosts.ssh_connection import LAST_READS, SSHConnection
from phalanx.launcher.worker_environment import forwarded


class SSHHost:
    """Implements `WorkerHost` for another host. Not thread-safe.

    The workers live as long as the connection: when it ends, for whatever reason, they are killed.

    Args:
        host_spec: The host, and the initial number of ports.
        show_line: Shows a line from ssh or the host's login scripts, in the thread that calls `ports` or `events`.
        environ: Variables for ssh, some of which are forwarded to the workers.

    Attributes:
        lost: See `WorkerHost`.
        new_ports: Ports requested by `grow` that have arrived.
    """

    needs_polling = False

    def __init__(
        self,
        selector: selectors.BaseSelector,
        host_spec: HostSpec,
        *,
        show_line: Callable[[str], None],
        environ: Mapping[str, str] | None = None,
    ):
        self.host_spec = host_spec
        self.name = host_spec.name
        self.lost = False
        self.new_ports: list[int] = []
        self._selector = selector
        self._environ = process_environment() if environ is None else environ
        self._show_line = show_line
        self._connection: SSHConnection | None = None
        self._running: set[int] = set()  # ranks whose exit was not reported; all exit if the connection ends
        self._directory = ""  # of this process at `connect`: the workers run in the same one

    def connect(self) -> None:
        """Start ssh; `ports` waits for it.

        Raises: ConfigurationError if it cannot be started.
        """
        self._directory = os.getcwd()
        with _signals_deferred():  # otherwise one could end this process and leave ssh running
            self._connection = SSHConnection(self.name, self.host_spec.login, self._environ, self._show_line)
        self._send(Prepare(self.host_spec.workers, self._directory, self.name))

    def ports(self, deadline: float) -> list[int]:
        """Wait for the ports that the host holds open for its workers.

        Args:
            deadline: Time limit, by `time.monotonic`.

        Raises: RendezvousError if the host cannot be reached; ConfigurationError if it cannot do what is requested.
        """
        connection = self._connection
        assert connection is not None
        with selectors.DefaultSelector() as selector:
            connection.register(selector)
            try:
                while True:
                    left_s = deadline - time.monotonic()
                    ready = selector.select(max(0.0, left_s))
                    connection.relay()
                    answers = connection.answers()
                    if answers is None:
                        raise RendezvousError(
                            f"ssh to {self.host_spec.login} ended with exit code {connection.wait()} before the "
                            f"workers were started. Its message is above. The host needs a login without password, "
                            f"and Phalanx at the same path ({REMOTE_PYTHON} names its Python if that is elsewhere)."
                        )
                    for answer in answers:
                        if isinstance(answer, Prepared):
                            return answer.ports
                        if isinstance(answer, Refused):
                            raise ConfigurationError(f"{self.name}: {answer.reason}.")
                    if not ready and left_s <= 0:
                        raise RendezvousError(
                            f"{self.name} did not answer through ssh in time. Try `ssh {self.host_spec.login} true`, "
                            "which must work without a password. --start-timeout allows more time."
                        )
            finally:
                connection.unregister()

    def start(self, specs: Sequence[WorkerSpec]) -> list[Event]:
        """Start workers; `events` later returns their `Started`. Before the first call, `events` returns nothing."""
        if self.lost:
            return [Exited(spec.rank, None, WorkerDiagnostics()) for spec in specs]
        assert self._connection is not None
        if not self._connection.is_registered:  # the first call: workers need heartbeats from now on
            self._connection.keep_alive()
        self._connection.register(self._selector)
        self._running |= {spec.rank for spec in specs}
        if specs:
            variables = forwarded(self._environ)
            whole = [msgspec.structs.replace(spec, environment={**variables, **spec.environment}) for spec in specs]
            self._send(Start(whole))
        return []

    def restart(self, rank: int) -> Event | None:
        if self._connection is None or not self._connection.is_registered:  # the host is gone
            return Exited(rank, None, WorkerDiagnostics())
        self._running.add(rank)
        self._send(Restart(rank))
        return None

    def events(self) -> list[Event]:
        connection = self._connection
        if connection is None or not connection.is_registered:
            return []
        connection.relay()
        answers = connection.answers()
        if answers is None:
            return self._lose(connection)
        events: list[Event] = []
        for answer in answers:
            if isinstance(answer, Prepared):
                self.new_ports += answer.ports
            elif not isinstance(answer, Refused):
                events.append(answer)
            if isinstance(answer, Exited):
                self._running.discard(answer.rank)
        return events

    def _lose(self, connection: SSHConnection) -> list[Event]:
        """Handle the end of the connection, which ends the workers."""
        connection.relay(reads=LAST_READS)
        connection.unregister()
        self.lost = True
        lost = [Exited(rank, None, WorkerDiagnostics()) for rank in sorted(self._running)]
        self._running.clear()
        return list(lost)

    def dump_stacks(self, rank: int) -> None:
        self._send(DumpStacks(rank))

    def request_checkpoint(self, rank: int) -> None:
        self._send(RequestCheckpoint(rank))

    def signal(self, rank: int, number: int) -> None:
        self._send(Signal(rank, number))

    def grow(self, workers: int) -> None:
        """Request ports for `workers` more workers; later calls of `events` receive them."""
        self._send(Prepare(workers, self._directory, self.name))

    def abandon(self) -> None:
        """Make `ports`, which waits in another thread, raise an error."""
        if self._connection is not None:
            self._connection.kill()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _send(self, command: Command) -> None:
        if self._connection is not None:
            self._connection.send(command)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer the handlers of signals that end this process until after the block."""
    if threading.current_thread() is not threading.main_thread():  # handlers only run in the main thread
        yield
        return
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    deferred = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in deferred:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in deferred.items():
            signal.signal(number, handler)
        for caught in received:
            signal.raise_signal(caught)
