"""One ssh process connected to an agent (`remote_agent`): sends commands and receives answers."""

from __future__ import annotations

import errno
import os
import select
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from phalanx.config.environment_variables import DEFAULT_SSH, REMOTE_PYTHON, SSH
from phalanx.errors import ConfigurationError, FrameError
from phalanx.launcher.host_messages import HEARTBEAT_S, LEASE_S, Answer, Command, KeepAlive, LineReader, Start
from phalanx.launcher.orphan_reaper import exclude_from_reaping
from phalanx.transport.decoding import Decoder

READ_BYTES = 65536
# A pipe holds far less than this many reads.
LAST_READS = 100
CLOSE_S = 5.0


class SSHConnection:
    """A connection to a host; the constructor starts ssh. Not thread-safe.

    A thread sends heartbeats to the agent, because the main thread may block on a paused terminal.

    Args:
        name: Name of the host in messages.
        login: Destination for ssh.
        environ: Variables that choose the ssh command and the remote Python.
        show_line: Shows a line from ssh or the host's login scripts, in the thread that calls `answers` or `relay`.

    Raises: ConfigurationError if ssh cannot be started.
    """

    def __init__(self, name: str, login: str, environ: Mapping[str, str], show_line: Callable[[str], None]):
        self.name = name
        self._show_line = show_line
        self._lines, self._error_lines = LineReader(), LineReader()
        self._decoder: Decoder[Answer] = Decoder(Answer, json=True)
        self._selector: selectors.BaseSelector | None = None
        self._process = self._start(login, environ)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        assert self._process.stdin is not None
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        self._sending = threading.Lock()  # keeps commands whole, and stdin open while one is written
        self._closed = threading.Event()

    def _start(self, login: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        python = shlex.quote(environ.get(REMOTE_PYTHON) or sys.executable)
        ssh = environ.get(SSH) or DEFAULT_SSH
        # `-P`, because the remote shell starts in the home directory, whose files must not shadow modules.
        remote = f"exec {python} -P -m phalanx.launcher.hosts.remote_agent"
        try:
            # Not our stderr: ssh makes it non-blocking, and our stdout too if both are one pipe. A separate session, so
            # that Ctrl-C only reaches the launcher, which shuts the job down in order.
            process = subprocess.Popen(
                [*shlex.split(ssh), login, remote],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: an unclosed quote
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigurationError(
                f"{self.name} cannot be reached by {ssh!r}: {reason}. Install OpenSSH's client, or set {SSH} to a "
                "command that takes a host and a command line."
            ) from error
        exclude_from_reaping(process)
        return process

    @property
    def is_registered(self) -> bool:
        return self._selector is not None

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the pipes with `selector`, for reading. Safe to call twice."""
        if self._selector is None:
            self._selector = selector
            for pipe in (self._stdout, self._stderr):
                if not pipe.closed:
                    selector.register(pipe.fileno(), selectors.EVENT_READ)

    def unregister(self) -> None:
        """Undo `register`. Safe to call twice."""
        selector, self._selector = self._selector, None
        for pipe in (self._stdout, self._stderr):
            if selector is not None and not pipe.closed:
                selector.unregister(pipe.fileno())

    def send(self, command: Command) -> None:
        """Send a command. Raises: ConfigurationError if it cannot be encoded."""
        try:
            data = msgspec.json.encode(command) + b"\n"
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"{_variable_with(error.object, command)}{error.object!r} cannot be sent to {self.name}, as it is not "
                "UTF-8. With workers on other hosts, the directory, the arguments and the forwarded variables must be."
            ) from error
        with self._sending:
            self._write(data)

    def _write(self, data: bytes) -> None:
        """Write to ssh. If ssh blocks for so long that the agent has given up too, end the connection. EOF on stdout
        follows, as when ssh is gone, and the loss is handled there."""
        deadline = time.monotonic() + LEASE_S
        while data:
            try:
                data = data[os.write(self._stdin.fileno(), data) :]
            except BlockingIOError:
                if not self._can_write(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    return
            except BrokenPipeError:
                return

    def _can_write(self, within_s: float) -> bool:
        poller = select.poll()
        poller.register(self._stdin, select.POLLOUT)
        return bool(poller.poll(1000 * within_s))

    def keep_alive(self) -> None:
        """Start sending heartbeats to the agent, until `close`."""
        threading.Thread(target=self._send_heartbeats, name=f"phalanx-alive-{self.name}", daemon=True).start()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with self._sending:
                if not self._closed.is_set() and self._can_write(0.0):  # a full pipe serves as a heartbeat too
                    self._write(msgspec.json.encode(KeepAlive()) + b"\n")

    def answers(self) -> list[Answer] | None:
        """Return the messages that the agent has sent; None at the end of the connection. Never blocks."""
        found: list[Answer] = []
        while True:
            try:
                data = os.read(self._stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                return found
            if not data:
                return found or None  # the next call reports the end, once these answers are handled
            found += [answer for line in self._lines.feed(data) if (answer := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Answer | None:
        try:
            return self._decoder.decode(line)
        except FrameError:
            # Output of a login script on that host, meant for the user.
            self._show(line)
            return None

    def relay(self, *, reads: int = 1) -> None:
        """Show what ssh has written to stderr, in at most `reads` reads. Never waits for EOF, which does not follow the
        exit of ssh if other processes hold the pipe (ControlPersist)."""
        for _ in range(reads):
            if self._stderr.closed:
                return
            try:
                data = os.read(self._stderr.fileno(), READ_BYTES)
            except BlockingIOError:
                return
            for line in self._error_lines.feed(data or b"\n"):
                self._show(line)
            if not data:
                if self._selector is not None:
                    self._selector.unregister(self._stderr.fileno())
                self._stderr.close()

    def _show(self, line: bytes) -> None:
        self._show_line(f"[{self.name}] {line.decode(errors='replace').rstrip()}")

    def wait(self) -> int:
        """Return the exit code of ssh, once the connection has ended."""
        code = self._end()
        self.relay(reads=LAST_READS)
        return code

    def kill(self) -> None:
        """End the connection immediately. May be called while another thread waits for answers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Hang up; the agent then kills what still runs on the host. Call once."""
        if self._selector is None:
            self.kill()  # no worker runs there yet, and ssh may be stuck while connecting
        self.unregister()
        # `_send_heartbeats` checks this with the lock held, so it never writes to a descriptor that is closed below and
        # whose number may be reused.
        self._closed.set()
        with self._sending:
            for pipe in (self._stdin, self._stdout, self._stderr):
                pipe.close()
        self._end()

    def _end(self) -> int:
        """Wait for ssh to exit after its connection has ended, kill it if it does not, and return its exit code."""
        try:
            return self._process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()


def _variable_with(text: str, command: Command) -> str:
    """`NAME=` if the text is the value of an environment variable of a task."""
    specs = command.specs if isinstance(command, Start) else []
    return next((f"{name}=" for spec in specs for name, value in spec.environment.items() if value == text), "")
