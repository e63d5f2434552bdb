"""One ssh process with an agent (`remote_agent`) at its other end: commands go in, answers come out."""

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
from phalanx.launcher.host_messages import KEEP_ALIVE_S, SILENCE_S, Answer, Command, KeepAlive, LineReader, Start
from phalanx.launcher.orphan_reaper import await_end
from phalanx.transport.decoding import Decoder

READ_BYTES = 65536
# A pipe holds far less than this many reads.
LAST_READS = 100
CLOSE_S = 5.0


class SSHConnection:
    """Starts ssh when it is created. Not thread-safe.

    A thread shows the agent that the launcher is there: the main thread may be waiting for a terminal that is paused.

    Args:
        name: of the host, for messages.
        login: the destination for ssh.
        environ: variables that choose the ssh command and the remote Python.
        say: shows a line of ssh or of the host's login scripts, in the thread that calls `answers` or `relay`.

    Raises: ConfigurationError if ssh cannot be started.
    """

    def __init__(self, name: str, login: str, environ: Mapping[str, str], say: Callable[[str], None]):
        self.name = name
        self._say = say
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
        # `-P`: the remote shell starts in the home directory, whose files must not shadow modules.
        remote = f"exec {python} -P -m phalanx.launcher.hosts.remote_agent"
        try:
            # Not our stderr: ssh makes it non-blocking, and with it our stdout if both are one pipe. A session of its
            # own: Ctrl-C is for the launcher, which ends the job in order.
            process = subprocess.Popen(
                [*shlex.split(ssh), login, remote],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a quote is left open
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigurationError(
                f"{self.name} cannot be reached by {ssh!r}: {reason}. Install OpenSSH's client, or set {SSH} to a "
                "command that takes a host and a command line."
            ) from error
        await_end(process)
        return process

    @property
    def is_registered(self) -> bool:
        return self._selector is not None

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` wake when there is something to read. Safe to call twice."""
        if self._selector is None:
            self._selector = selector
            for pipe in (self._stdout, self._stderr):
                if not pipe.closed:
                    selector.register(pipe.fileno(), selectors.EVENT_READ)

    def unregister(self) -> None:
        """Safe to call twice."""
        selector, self._selector = self._selector, None
        for pipe in (self._stdout, self._stderr):
            if selector is not None and not pipe.closed:
                selector.unregister(pipe.fileno())

    def send(self, command: Command) -> None:
        """Raises: ConfigurationError if the command cannot be encoded."""
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
        """If ssh takes nothing for so long that the agent has given up too, the connection is ended. The end of stdout
        follows, as it does when ssh is gone; there the loss is handled."""
        deadline = time.monotonic() + SILENCE_S
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
        """Show the agent from now on, until `close`, that the launcher is there."""
        threading.Thread(target=self._send_heartbeats, name=f"phalanx-alive-{self.name}", daemon=True).start()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(KEEP_ALIVE_S):
            with self._sending:
                if not self._closed.is_set() and self._can_write(0.0):  # what fills the pipe is a heartbeat too
                    self._write(msgspec.json.encode(KeepAlive()) + b"\n")

    def answers(self) -> list[Answer] | None:
        """The messages that the agent has sent; None at the end of the connection. Never blocks."""
        found: list[Answer] = []
        while True:
            try:
                data = os.read(self._stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                return found
            if not data:
                return found or None  # the end comes again with the next call, once what was found is handled
            found += [answer for line in self._lines.feed(data) if (answer := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Answer | None:
        try:
            return self._decoder.decode(line)
        except FrameError:
            # A login script on that host prints to stdout; that is for the user.
            self._show(line)
            return None

    def relay(self, *, reads: int = 1) -> None:
        """Show what ssh has written to stderr, in at most so many reads. Never waits for the end, which does not come
        with that of ssh if other processes hold the pipe (ControlPersist)."""
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
        self._say(f"[{self.name}] {line.decode(errors='replace').rstrip()}")

    def wait(self) -> int:
        """The exit code of ssh, once the connection has ended."""
        code = self._end()
        self.relay(reads=LAST_READS)
        return code

    def kill(self) -> None:
        """End the connection at once; may be called while another thread waits for answers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Hang up, upon which the agent kills what still runs there. Call it once."""
        if self._selector is None:
            self.kill()  # nothing runs there yet, and ssh may be stuck on the way
        self.unregister()
        # `_send_heartbeats` looks at it with the lock held: it never writes to a descriptor that is closed below,
        # whose number may be another file's by then.
        self._closed.set()
        with self._sending:
            for pipe in (self._stdin, self._stdout, self._stderr):
                pipe.close()
        self._end()

    def _end(self) -> int:
        """Wait until ssh, whose connection has ended, exits, and see to it that it does; its exit code."""
        try:
            return self._process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()


def _variable_with(text: str, command: Command) -> str:
    """`NAME=`, if the text is the value of an environment variable of a task."""
    specs = command.specs if isinstance(command, Start) else []
    return next((f"{name}=" for spec in specs for name, value in spec.environment.items() if value == text), "")
