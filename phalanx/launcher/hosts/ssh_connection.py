"""One ssh process with an agent (`remote_agent`) at its other end: commands go in, answers come out."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

import msgspec

from phalanx.config.environment_variables import DEFAULT_SSH, REMOTE_PYTHON, SSH
from phalanx.errors import ConfigurationError, FrameError
from phalanx.launcher.host_messages import Answer, Command, LineReader, Start
from phalanx.launcher.orphan_reaper import await_end
from phalanx.transport.decoding import Decoder

READ_BYTES = 65536
# A pipe holds far less than this many reads.
LAST_READS = 100
CLOSE_S = 5.0


class SSHConnection:
    """Starts ssh when it is created. Not thread-safe.

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
        self._stdout, self._stderr = self._process.stdout, self._process.stderr
        for pipe in (self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)

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
        assert self._process.stdin is not None
        try:
            data = msgspec.json.encode(command) + b"\n"
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"{_variable_with(error.object, command)}{error.object!r} cannot be sent to {self.name}, as it is not "
                "UTF-8. With workers on other hosts, the directory, the arguments and the forwarded variables must be."
            ) from error
        with contextlib.suppress(BrokenPipeError):  # the end of stdout follows, and is where the loss is handled
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def answers(self) -> list[Answer] | None:
        """What the agent has sent; None at the end of the connection. Never blocks."""
        found: list[Answer] = []
        while True:
            try:
                data = os.read(self._stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                return found
            if not data:
                return found or None
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
        code = self._process.wait()
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
        for pipe in (self._process.stdin, self._stdout, self._stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # closing tries to send what was left
                    pipe.close()
        try:
            self._process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def _variable_with(text: str, command: Command) -> str:
    """`NAME=`, if the text is the value of an environment variable of a task."""
    specs = command.specs if isinstance(command, Start) else []
    return next((f"{name}=" for spec in specs for name, value in spec.environment.items() if value == text), "")
