"""One process of a worker on this host: starts it, reads its output, signals it, and always ends it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from phalanx.config.environment_variables import LISTEN_FD, PROGRESS_FILE, WORKER_BOOTSTRAP
from phalanx.launcher.host_messages import Event, Exited, Output, WorkerSpec
from phalanx.launcher.hosts.output_streams import OutputStreams, TerminalSize, WorkerStreams, set_terminal_size
from phalanx.launcher.hosts.worker_files import WorkerFiles
from phalanx.launcher.orphan_reaper import exclude_from_reaping
from phalanx.runtime import bootstrap
from phalanx.runtime.orphan_guard import OrphanGuard

READ_BYTES = 65536
# A pipe or a terminal holds far less than this many reads. More would come from a process that left the group.
LAST_READS = 1000
# Bounded, because a killed process may hang in the kernel.
KILL_WAIT_S = 2.0


@dataclass(frozen=True)
class WorkerLaunch:
    """Everything needed to start or restart a worker.

    Attributes:
        listener: Socket on the worker's port.
        cores: Cores that the worker is bound to.
        snapshots: Files of a restartable parameter server, which outlive its process.
    """

    spec: WorkerSpec
    listener: socket.socket
    cores: tuple[int, ...]
    environment: dict[str, str]
    snapshots: tuple[BinaryIO, ...]


class WorkerProcess:
    """A worker that has been started. Its descriptors are registered with `selector`.

    Attributes:
        has_exited: Whether its exit has been reported, or it has been closed.
    """

    def __init__(self, launch: WorkerLaunch, streams: OutputStreams, selector: selectors.BaseSelector):
        self.rank = launch.spec.rank
        self.has_exited = False
        self._selector = selector
        self._guard = OrphanGuard()
        self.files = WorkerFiles(launch.spec.function)
        opened = streams.open(self.rank)
        self._process = self._start(launch, opened)
        exclude_from_reaping(self._process)
        for fd in {opened.stdout, opened.stderr}:  # or the readers would never see EOF; a set: both may be the same
            os.close(fd)
        self._guard.started()
        self._readers = opened.readers
        self._pidfd = _open_pidfd(self.pid)  # readable once the process is dead; -1 if unsupported
        self._state = ""  # see `WorkerDiagnostics.state`
        for fd in (*self._readers, *([self._pidfd] if self._pidfd >= 0 else [])):
            selector.register(fd, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def needs_polling(self) -> bool:
        """Whether its exit does not wake the selector, because there is no pidfd (not Linux)."""
        return self._pidfd < 0 and not self.has_exited

    def _start(self, launch: WorkerLaunch, streams: WorkerStreams) -> subprocess.Popen[bytes]:
        spec, files = launch.spec, self.files
        function, result = files.call_descriptors
        start = bootstrap.WorkerBootstrap(
            cores=launch.cores,
            guard=self._guard.read_fd,
            stacks=files.stacks.fileno(),
            error=files.error.fileno(),
            prints_errors=spec.prints_errors,
            function=function,
            result=result,
        )
        environment = {
            **launch.environment,
            WORKER_BOOTSTRAP: start.encode(),
            LISTEN_FD: str(launch.listener.fileno()),
            PROGRESS_FILE: f"/dev/fd/{files.progress.fileno()}",
        }
        snapshots = [file.fileno() for file in launch.snapshots]
        return subprocess.Popen(
            [sys.executable, *spec.interpreter, bootstrap.__file__, *spec.arguments],
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            env=environment,
            cwd=spec.directory,
            pass_fds=[launch.listener.fileno(), self._guard.read_fd, *files.descriptors, *snapshots],
            start_new_session=True,  # a separate group, so that its children can be ended with it
        )

    def events(self) -> Iterator[Event]:
        """Yield the worker's output and its exit, without blocking."""
        yield from self._read(reads=1)  # one read, so that other workers are read too
        if _is_dead(self.pid):
            yield from self._exit()

    def dump_stacks(self) -> None:
        """Request the worker's stacks, if it can write them. They arrive with its `Exited`."""
        self._state = _process_state(self.pid)
        if self.files.has_reported:
            _signal(self.pid, bootstrap.STACKS_SIGNAL)

    def signal(self, number: int, *, alone: bool = False) -> None:
        """Send a signal. SIGTERM and SIGKILL also go to everything that the worker has started, unless `alone`."""
        if alone or number not in (signal.SIGTERM, signal.SIGKILL):
            _signal(self.pid, number)
            return
        _signal_group(self.pid, number)
        if number == signal.SIGTERM:
            _signal_group(self.pid, signal.SIGCONT)  # a stopped process could not act on it

    def resize(self, size: TerminalSize) -> None:
        """Set the size of its terminal."""
        for fd, is_error in self._readers.items():
            if not is_error:
                set_terminal_size(fd, size)
        _signal(self.pid, signal.SIGWINCH)

    def kill(self) -> None:
        """Kill it, if it still runs, and everything that it has started; `close` waits for its exit."""
        if not self.has_exited:
            _signal_group(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it still runs. Safe to call twice."""
        if self.has_exited:
            return
        self.kill()
        self.has_exited = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_WAIT_S)
        self._release()

    def _read(self, *, reads: int) -> list[Event]:
        events: list[Event] = []
        for fd, is_error in list(self._readers.items()):
            for _ in range(reads):
                try:
                    data = os.read(fd, READ_BYTES)
                except BlockingIOError:
                    break
                except OSError:  # a terminal whose other end is closed raises EIO instead of returning EOF
                    data = b""
                if not data:
                    self._close_reader(fd)
                    break
                events.append(Output(self.rank, is_error, data))
        return events

    def _exit(self) -> Iterator[Event]:
        # The dead leader is not reaped yet, so its group id cannot be reused: kill what it left behind.
        _signal_group(self.pid, signal.SIGKILL)
        # Only now read the last output, all of it before `Exited`: everything that held the pipes is dead too.
        yield from self._read(reads=LAST_READS)
        if (report := self.files.new_report(self.rank)) is not None:
            yield report
        returncode = _exit_code(self._process)
        self.has_exited = True
        diagnostics = self.files.diagnostics(self._state, code_is_unknown=returncode is None)
        if returncode is None:
            returncode = 0 if self.files.finished else 1
        result = self.files.result
        self._release()
        yield Exited(self.rank, returncode, diagnostics, result)

    def _release(self) -> None:
        for fd in list(self._readers):
            self._close_reader(fd)
        if self._pidfd >= 0:
            self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._guard.kill_group()
        self.files.close()

    def _close_reader(self, fd: int) -> None:
        del self._readers[fd]
        self._selector.unregister(fd)
        os.close(fd)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _open_pidfd(pid: int) -> int:
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # a kernel before 5.3, or a sandbox without this call
        return -1


def _is_dead(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # see `_exit_code`
        return True


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a dead process; None if it is lost, because the program ignores SIGCHLD (the kernel reaps it) or
    waits for any child."""
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        process.wait()  # returns 0
        return None
    return process.wait()


def _signal(pid: int, number: int) -> None:
    """Send a signal. `Popen.send_signal` could reap a process that has just died, before its exit is noticed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises EPERM for a group of zombies
        os.killpg(group, number)


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
