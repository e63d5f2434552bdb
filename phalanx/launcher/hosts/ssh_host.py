"""The workers of another host, through ssh and an agent there (`agent.py`)."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from phalanx.config.environment import process_environment
from phalanx.config.variables import DEFAULT_SSH, REMOTE_PYTHON, SSH
from phalanx.errors import ConfigurationError, RendezvousError
from phalanx.launcher.host_messages import (
    Answer,
    Command,
    DumpStacks,
    Event,
    Exited,
    Prepare,
    Prepared,
    Refused,
    Restart,
    Signal,
    Start,
    WorkerDiagnostics,
    WorkerSpec,
)
from phalanx.launcher.host_slots import HostShare
from phalanx.launcher.hosts.remote_agent import LineReader
from phalanx.launcher.worker_environment import forwarded
from phalanx.runtime.orphan_guard import await_end

READ_BYTES = 65536
# A pipe holds far less than this many reads.
LAST_READS = 100


class SSHHost:
    """Runs workers on another host. Not thread-safe.

    The connection is the workers' lifeline: when it ends, whichever end is the reason, they are killed.

    Args:
        say: is told what ssh and the host's login scripts print, a line each, by whoever calls `ports` or `events`.

    Attributes:
        lost: whether the connection has ended by itself. Nothing can be started there any more.
        new_ports: for which `grow` has asked, once they are there.
    """

    needs_polling = False

    def __init__(
        self,
        selector: selectors.BaseSelector,
        share: HostShare,
        *,
        say: Callable[[str], None],
        environ: Mapping[str, str] | None = None,
    ):
        self._selector = selector
        self._environ = process_environment() if environ is None else environ
        self.share = share
        self.name = share.name
        self._process: subprocess.Popen[bytes] | None = None
        self._say = say
        self._reader = LineReader()
        self._words = LineReader()  # of ssh, on its stderr
        self._answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
        self._running: set[int] = set()
        self._registered = False
        self.lost = False
        self.new_ports: list[int] = []
        self._folder = ""

    def connect(self) -> None:
        """Start ssh; `ports` waits for it.

        Raises: ConfigurationError if it cannot be started.
        """
        python = self._environ.get(REMOTE_PYTHON) or sys.executable
        # `-P`: the remote shell starts in the home folder, whose files must not shadow modules.
        remote = f"exec {shlex.quote(python)} -P -m phalanx.launcher.hosts.remote_agent"
        ssh = self._environ.get(SSH) or DEFAULT_SSH
        # A session of its own: Ctrl-C is for the launcher, which ends the job in order.
        self._folder = os.getcwd()
        try:
            with _undisturbed():  # else it would be nobody's that the interpreter has started and not returned yet
                # Not our stderr: ssh makes it non-blocking, and with it our stdout where both are one pipe.
                self._process = process = subprocess.Popen(
                    [*shlex.split(ssh), self.share.login, remote],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
                await_end(process)
        except (OSError, ValueError) as error:  # ValueError: a quote is left open
            reason = error.strerror if isinstance(error, OSError) else str(error)
            if getattr(error, "errno", None) == errno.EMFILE:
                raise
            raise ConfigurationError(
                f"{self.name} cannot be reached by {ssh!r}: {reason}. Install OpenSSH's client, or set {SSH} to a "
                "command that takes a host and a command line."
            ) from error
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        self._send(Prepare(self.share.workers, self._folder))

    def ports(self, deadline: float) -> list[int]:
        """The ports that the host holds open for its workers.

        Args:
            deadline: by `time.monotonic`.

        Raises: RendezvousError if the host cannot be reached; ConfigurationError if it cannot do what is
            asked.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        fd = process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            selector.register(process.stderr.fileno(), selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
                self._relay(selector)
                if fd not in ready and time.monotonic() < deadline:
                    continue
                if fd not in ready:
                    raise RendezvousError(
                        f"{self.name} did not answer through ssh in time. Try `ssh {self.share.login} true`, "
                        "which must work without a password. --start-timeout allows more time."
                    )
                data = os.read(fd, READ_BYTES)
                if not data:
                    code = process.wait()
                    self._relay(selector, reads=LAST_READS)
                    raise RendezvousError(
                        f"ssh to {self.share.login} ended with exit code {code} before the workers were "
                        "started. Its message stands above. The host needs a login without password, and "
                        f"Phalanx in the same place ({REMOTE_PYTHON} names its Python if that is elsewhere)."
                    )
                for line in self._reader.feed(data):
                    answer = self._decode(line)
                    if isinstance(answer, Prepared):
                        return answer.ports
                    if isinstance(answer, Refused):
                        raise ConfigurationError(f"{self.name}: {answer.reason}.")

    def start(self, specs: Sequence[WorkerSpec]) -> list[Event]:
        """Start workers, as `LocalHost.start` does; from the first call on, `events` hears of the host."""
        environment = forwarded(self._environ)
        specs = [msgspec.structs.replace(spec, environment={**environment, **spec.environment}) for spec in specs]
        process = self._process
        assert process is not None
        assert process.stdout is not None
        if self.lost:
            return [Exited(spec.rank, None, WorkerDiagnostics()) for spec in specs]
        self._running |= {spec.rank for spec in specs}
        if not self._registered:
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout.fileno(), selectors.EVENT_READ)
            if process.stderr is not None and not process.stderr.closed:
                self._selector.register(process.stderr.fileno(), selectors.EVENT_READ)
            self._registered = True
        if specs:
            self._send(Start(specs))
        return []

    def restart(self, rank: int) -> Event | None:
        """Start a worker again that has ended; its `Started` is among the events to come."""
        if not self._registered:  # the host is gone
            return Exited(rank, None, WorkerDiagnostics())
        self._running.add(rank)
        self._send(Restart(rank))
        return None

    def events(self) -> list[Event]:
        process = self._process
        if not self._registered or process is None or process.stdout is None:
            return []
        self._relay(self._selector)
        events: list[Event] = []
        while True:
            try:
                data = os.read(process.stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                return events
            if not data:
                return events + self._lose()
            for line in self._reader.feed(data):
                answer = self._decode(line)
                if isinstance(answer, Prepared):
                    self.new_ports += answer.ports
                if answer is None or isinstance(answer, (Prepared, Refused)):
                    continue
                if isinstance(answer, Exited):
                    self._running.discard(answer.rank)
                events.append(answer)

    def dump_stacks(self, rank: int) -> None:
        self._send(DumpStacks(rank))

    def signal(self, rank: int, number: int) -> None:
        self._send(Signal(rank, number))

    def close(self) -> None:
        """Hang up, upon which the agent kills what still runs there. Safe to call twice."""
        process = self._process
        if process is None:
            return
        if not self._registered and process.poll() is None:  # nothing runs there; ssh may be stuck on the way
            os.killpg(process.pid, signal.SIGKILL)
        self._unregister()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # ssh has ended; closing tries to send what was left
                    pipe.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._process = None

    def grow(self, workers: int) -> None:
        """Ask for ports for so many workers more, which come with later `events`."""
        self._send(Prepare(workers, self._folder))

    def abandon(self) -> None:
        """Have `ports`, which waits in another thread, end with an error."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _relay(self, selector: selectors.BaseSelector, *, reads: int = 1) -> None:
        """Pass on what ssh has said, in at most so many reads. Never waits for the end, which does not come with that
        of ssh where others hold the pipe (ControlPersist)."""
        stream = self._process.stderr if self._process is not None else None
        for _ in range(reads):
            if stream is None or stream.closed:
                return
            try:
                data = os.read(stream.fileno(), READ_BYTES)
            except BlockingIOError:
                return
            for line in self._words.feed(data or b"\n"):
                self._pass_on(line)
            if not data:
                selector.unregister(stream.fileno())
                stream.close()

    def _pass_on(self, line: bytes) -> None:
        self._say(f"[{self.name}] {line.decode(errors='replace').rstrip()}")

    def _lose(self) -> list[Event]:
        self._relay(self._selector, reads=LAST_READS)
        self._unregister()
        self.lost = True
        lost = [Exited(rank, None, WorkerDiagnostics()) for rank in sorted(self._running)]
        self._running.clear()
        return list(lost)

    def _unregister(self) -> None:
        process = self._process
        if not self._registered or process is None:
            return
        for pipe in (process.stdout, process.stderr):
            if pipe is not None and not pipe.closed:
                self._selector.unregister(pipe.fileno())
        self._registered = False

    def _send(self, command: Command) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            data = msgspec.json.encode(command) + b"\n"
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"{_whose(error.object, command)}{error.object!r} cannot be sent to {self.name}, as it is not UTF-8. "
                "With workers on other hosts, the folder, the arguments and the variables that go along must be."
            ) from error
        try:
            process.stdin.write(data)
            process.stdin.flush()
        except BrokenPipeError:
            return  # the end of stdout follows, and is where the loss is handled

    def _decode(self, line: bytes) -> Answer | None:
        try:
            return self._answers.decode(line)
        except msgspec.DecodeError:
            # A login script on that host prints to stdout; it is for a reader, not for us.
            self._pass_on(line)
            return None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Handlers of signals that end this process run after what is inside, and not in its middle."""
    if threading.current_thread() is not threading.main_thread():  # where none run
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in held:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for caught in came:
            signal.raise_signal(caught)


def _whose(text: str, command: Command) -> str:
    """`NAME=`, if the text is the value of an environment variable of a task."""
    specs = command.specs if isinstance(command, Start) else []
    return next((f"{name}=" for spec in specs for name, value in spec.environment.items() if value == text), "")
