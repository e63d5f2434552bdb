"""The workers of this host: started, listened to, signalled and, without exception, ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from msgspec.structs import replace

from phalanx.config.environment import process_environment
from phalanx.config.variables import LISTEN_FD, PROGRESS_FILE, SNAPSHOTS, WORKER_BOOTSTRAP
from phalanx.devices.gpu_assignment import worker_gpu_variables
from phalanx.devices.gpu_count import HIDE_GPUS, count_gpus
from phalanx.launcher.host_messages import (
    CheckpointBeforeExit,
    Event,
    Exited,
    Output,
    Started,
    StepTimingReported,
    WorkerDiagnostics,
    WorkerSpec,
)
from phalanx.launcher.worker_environment import worker_environment
from phalanx.runtime import bootstrap, crash_report, progress
from phalanx.runtime.core_affinity import CoreShare, available_cores, host_shares
from phalanx.runtime.orphan_guard import OrphanGuard, await_end, reap_orphans

READ_BYTES = 65536
# A pipe or a terminal holds far less than this many reads; more would come from a process that left the group.
LAST_READS = 1000
# A killed process may hang in the kernel; it is left to it.
KILL_WAIT_S = 2.0
# A worker's stacks are written by a signal handler, within a millisecond unless the host is badly overloaded.
MAX_STACK_CHARACTERS = 40_000
LISTEN_BACKLOG = 128
PACE_S = 1.0
"""How often workers are asked how they go, where they say so, and orphans are reaped."""


@dataclass(frozen=True, slots=True)
class TerminalSize:
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class OutputStreams:
    """How the workers' outputs are connected.

    Attributes:
        merged: stdout and stderr go to one place, so that their order is kept.
        terminal: rank 0 gets a terminal of this size, since the launcher's own output is one; None for pipes.
        inherit_input: rank 0 reads the launcher's stdin. Others, and all if False, read nothing.
    """

    merged: bool = False
    terminal: TerminalSize | None = None
    inherit_input: bool = False


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    lifeline: OrphanGuard
    progress: BinaryIO
    stacks: BinaryIO
    error: BinaryIO
    result: BinaryIO
    outputs: dict[int, bool]  # descriptor: is it stderr
    pidfd: int
    state: str = ""
    ended: bool = False
    noted: int = 0  # the number of the last `progress.Totals`
    files: list[BinaryIO] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """What a worker is started with, and started again. `files` outlive the process."""

    spec: WorkerSpec
    listener: socket.socket
    cores: tuple[int, ...]
    environment: dict[str, str]
    files: tuple[BinaryIO, ...]


class LocalHost:
    """Runs workers as processes of this host. Not thread-safe: all calls come from one thread at a time.

    Descriptors that may have something to read are registered with `selector`; `events` then collects. The
    selector may belong to a loop that watches other things as well.

    Args:
        shares: the workers' cores; by default they have the host to themselves.

    Attributes:
        lost: never; see `RemoteHost`.
    """

    name = "localhost"

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        streams: OutputStreams | None = None,
        shares: Sequence[CoreShare] | None = None,
    ):
        self._selector = selector
        self._streams = streams or OutputStreams()
        self._listeners: list[socket.socket] = []
        self._workers: dict[int, _Worker] = {}
        self._returning: dict[int, _Place] = {}
        self._shares = shares
        self._heeding: list[Event] = []
        self._not_training: set[int] = set()  # slots
        self.lost = False
        self._paces_at = 0.0
        self._hears_of_ends = False  # whether that was switched on here

    # ---- starting

    def prepare(self, workers: int, *, address: str | None = "127.0.0.1") -> list[int]:
        """Open a listening port for each worker, beside those that are open already; it is inherited, never closed and
        bound again. Returns the ports.

        Args:
            address: to listen on; None for all addresses of this host.
        """
        opened = [listen(address) for _ in range(workers)]
        self._listeners += opened
        return [listener.getsockname()[1] for listener in opened]

    def start(self, specs: Sequence[WorkerSpec]) -> list[Event]:
        """Start workers, for which `prepare` has opened ports: all at once, or, if their specs name slots, some."""
        if not specs:
            return []
        self._hear_of_ends()
        specs = [replace(spec, slot=i) if spec.slot is None else spec for i, spec in enumerate(specs)]
        self._not_training |= {spec.slot for spec in specs if spec.slot is not None and not spec.trains}
        base = process_environment()
        shares, devices = self._divide()
        events: list[Event] = []
        for spec in specs:
            assert spec.slot is not None
            listener, share, device = self._listeners[spec.slot], shares[spec.slot], devices[spec.slot]
            environment = worker_environment(base, {**device, **spec.environment}, share.threads, spec.directory)
            files = (_unnamed_file(), _unnamed_file()) if spec.has_snapshots else ()
            if files:
                environment[SNAPSHOTS] = ":".join(f"/dev/fd/{file.fileno()}" for file in files)
            place = _Place(spec, listener, share.cores, environment, files)
            worker = self._start(place)
            if spec.restartable:
                self._returning[spec.rank] = place
            else:
                listener.close()
            events.append(Started(spec.rank, worker.process.pid))
        return events

    def _hear_of_ends(self) -> None:
        """Where SIGCHLD is ignored, which is inherited, the kernel keeps the workers' exit codes from us."""
        if _is_main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._hears_of_ends = True

    def restart(self, rank: int) -> Event:
        """Start a worker again that has ended and whose order says that it returns, at the same port."""
        return Started(rank, self._start(self._returning[rank]).process.pid)

    def _divide(self) -> tuple[Sequence[CoreShare], Sequence[Mapping[str, str]]]:
        """Cores and GPUs for each slot; those without a replica may use all cores, with one thread, and no GPU."""
        base = process_environment()
        replicas = len(self._listeners) - len(self._not_training)
        shares = iter(host_shares(replicas) if self._shares is None else self._shares)
        devices = iter(worker_gpu_variables(replicas, count_gpus(base), base))
        other = CoreShare(tuple(available_cores()), 1)
        trains = [slot not in self._not_training for slot in range(len(self._listeners))]
        return (
            [next(shares) if replica else other for replica in trains],
            [next(devices) if replica else HIDE_GPUS for replica in trains],
        )

    def _start(self, place: _Place) -> _Worker:
        spec, listener = place.spec, place.listener
        line = OrphanGuard()
        record, stacks, error = _anonymous_file(), _anonymous_file(), _anonymous_file()
        function, result = _anonymous_file(), _anonymous_file()
        record.write(progress.blank())
        record.flush()
        if spec.function:
            function.write(spec.function)
            function.seek(0)
        stdin, stdout, stderr, reading = self._connect(spec.rank)
        child_order = bootstrap.WorkerBootstrap(
            cores=place.cores,
            parent=os.getpid(),
            die_with_parent=_is_main_thread(),
            lifeline=line.worker_end,
            stacks=stacks.fileno(),
            error=error.fileno(),
            function=function.fileno() if spec.function else -1,
            result=result.fileno() if spec.function else -1,
        )
        passed = [listener.fileno(), line.worker_end, record.fileno(), stacks.fileno(), error.fileno()]
        passed += [file.fileno() for file in place.files]
        if spec.function:
            passed += [function.fileno(), result.fileno()]
        environment = {
            **place.environment,
            WORKER_BOOTSTRAP: child_order.encode(),
            LISTEN_FD: str(listener.fileno()),
            PROGRESS_FILE: f"/dev/fd/{record.fileno()}",
        }
        process = subprocess.Popen(
            [sys.executable, *spec.interpreter, bootstrap.__file__, *spec.arguments],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=spec.directory,
            pass_fds=passed,
            start_new_session=True,  # its own group, so that what it starts can be ended with it
        )
        await_end(process)
        for fd in {stdout, stderr}:
            os.close(fd)
        function.close()
        line.started()
        worker = _Worker(spec.rank, process, line, record, stacks, error, result, reading, _open_pidfd(process.pid))
        self._workers[spec.rank] = worker
        for fd in (*reading, *([worker.pidfd] if worker.pidfd >= 0 else [])):
            self._selector.register(fd, selectors.EVENT_READ)
        return worker

    def _connect(self, rank: int) -> tuple[int | None, int, int, dict[int, bool]]:
        """stdin, stdout and stderr for a worker, and the ends on which we read what it writes."""
        streams = self._streams
        stdin = None if streams.inherit_input and rank == 0 else subprocess.DEVNULL
        if rank == 0 and streams.terminal is not None:
            ours, theirs = _open_terminal(streams.terminal)
        else:
            ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        if streams.merged:
            return stdin, theirs, theirs, {ours: False}
        error_ours, error_theirs = os.pipe()
        os.set_blocking(error_ours, False)
        return stdin, theirs, error_theirs, {ours: False, error_ours: True}

    # ---- listening

    @property
    def needs_polling(self) -> bool:
        """Whether a worker's end wakes no selector (no pidfd: not Linux), so that `events` must be polled."""
        return any(worker.pidfd < 0 for worker in self._workers.values() if not worker.ended)

    def events(self) -> list[Event]:
        """What happened since the last call; never blocks."""
        events, self._heeding = self._heeding, []
        for worker in self._workers.values():
            if not worker.ended:
                events += self._read(worker)
                if _has_exited(worker.process.pid):
                    events += self._bury(worker)
        now = time.monotonic()
        if now >= self._paces_at:
            self._paces_at = now + PACE_S
            events += self._paces()
            reap_orphans()
        return events

    def _paces(self) -> list[Event]:
        """How the workers go that say so."""
        events: list[Event] = []
        for worker in self._workers.values():
            totals = None if worker.ended else progress.parse_totals(_content(worker.progress))
            if totals is not None and totals.number != worker.noted:
                worker.noted = totals.number
                events.append(StepTimingReported(worker.rank, totals.computed_s, totals.waited_s, totals.steps))
        return events

    def _read(self, worker: _Worker, *, reads: int = 1) -> list[Event]:
        """What the worker has written, in at most so many reads: the others must be heard too."""
        events: list[Event] = []
        for fd, is_error in list(worker.outputs.items()):
            for _ in range(reads):
                try:
                    data = os.read(fd, READ_BYTES)
                except BlockingIOError:
                    break
                except OSError:  # a terminal whose other side is closed says EIO instead of end-of-file
                    data = b""
                if not data:
                    self._close_output(worker, fd)
                    break
                events.append(Output(worker.rank, is_error, data))
        return events

    def _bury(self, worker: _Worker) -> list[Event]:
        # The dead leader is not reaped yet, so its group's id cannot belong to anybody else: end what it
        # left.
        _signal_group(worker.process.pid, signal.SIGKILL)
        events = self._read(worker, reads=LAST_READS)
        returncode = _exit_code(worker.process)
        worker.ended = True
        words_ = self._last_words(worker)
        if returncode is None:
            ended_well = _content(worker.error) == bootstrap.NO_ERROR
            returncode = 0 if ended_well else 1
            if not ended_well and words_.error is None:
                words_ = replace(words_, error=_UNHEARD)
        result = _content(worker.result)
        self._release(worker)
        place = self._returning.get(worker.rank)
        if returncode == 0 and place is not None and place.spec.frees_port:
            place.listener.close()  # it does not return: who asks there whether the job goes on must find nobody
        events.append(Exited(worker.rank, returncode, words_, result))
        return events

    def _last_words(self, worker: _Worker) -> WorkerDiagnostics:
        last = progress.parse(_content(worker.progress))
        stacks = bootstrap.without_own_frames(_content(worker.stacks).decode(errors="replace"))
        stacks = stacks[:MAX_STACK_CHARACTERS]
        error = crash_report.parse(_content(worker.error))
        if last is None:
            return WorkerDiagnostics(state=worker.state, stacks=stacks, error=error)
        return WorkerDiagnostics(
            phase=last.phase,
            epoch=last.epoch,
            step=last.step,
            age_s=max(0.0, time.time() - last.time),
            state=worker.state,
            stacks=stacks,
            error=error,
        )

    # ---- ending

    def dump_stacks(self, rank: int) -> None:
        """Have a worker write its stacks, which come with its `Exited`. Nothing happens if it cannot."""
        worker = self._workers.get(rank)
        if worker is None or worker.ended:
            return
        worker.state = _process_state(worker.process.pid)
        # Before its first report the signal's default action would kill it.
        if progress.parse(_content(worker.progress)) is not None:
            _signal(worker.process.pid, bootstrap.STACKS_SIGNAL)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker; SIGTERM and SIGKILL reach everything it has started. (But one that takes a
        checkpoint when it is told to end still needs what it has started: it gets SIGTERM alone, and `CheckpointBeforeExit` comes.)
        """
        worker = self._workers.get(rank)
        if worker is None or worker.ended:
            return
        if number == signal.SIGTERM and progress.parse_heeds(_content(worker.progress)):
            _signal(worker.process.pid, number)
            self._heeding.append(CheckpointBeforeExit(rank))
            return
        if number in (signal.SIGTERM, signal.SIGKILL):
            _signal_group(worker.process.pid, number)
            if number == signal.SIGTERM:
                _signal_group(worker.process.pid, signal.SIGCONT)  # a stopped process could not act on it
        else:
            _signal(worker.process.pid, number)

    def resize(self, size: TerminalSize) -> None:
        """Tell rank 0 that its terminal has another size now."""
        worker = self._workers.get(0)
        if worker is not None and not worker.ended and self._streams.terminal is not None:
            for fd, is_error in worker.outputs.items():
                if not is_error:
                    _set_size(fd, size)
            _signal(worker.process.pid, signal.SIGWINCH)

    def close(self) -> None:
        """End every worker that still runs, and free everything. Safe to call twice."""
        for listener in self._listeners:
            listener.close()
        for place in self._returning.values():
            for file in place.files:
                file.close()
        for worker in self._workers.values():
            if not worker.ended:
                worker.ended = True
                _signal_group(worker.process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(KILL_WAIT_S)
                self._release(worker)
        if self._hears_of_ends and _is_main_thread():
            self._hears_of_ends = False
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def _release(self, worker: _Worker) -> None:
        for fd in list(worker.outputs):
            self._close_output(worker, fd)
        if worker.pidfd >= 0:
            self._selector.unregister(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1
        worker.lifeline.cut()
        for file in (worker.progress, worker.stacks, worker.error, worker.result):
            file.close()

    def _close_output(self, worker: _Worker, fd: int) -> None:
        del worker.outputs[fd]
        self._selector.unregister(fd)
        os.close(fd)


def listen(address: str | None) -> socket.socket:
    """A listening socket on a port that the system chooses; on all addresses of this host for None."""
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=LISTEN_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=LISTEN_BACKLOG)
    return socket.create_server(("", 0), backlog=LISTEN_BACKLOG)


def _anonymous_file() -> BinaryIO:
    """A file without a name, so that none can be left behind."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("phalanx"), "w+b")
    return _unnamed_file()


def _unnamed_file() -> BinaryIO:
    """As `_anonymous_file`, on disk: for what would take much memory."""
    return tempfile.TemporaryFile()  # type: ignore[return-value]


def _content(file: BinaryIO) -> bytes:
    # pread, since the worker shares the file's position.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def _open_pidfd(pid: int) -> int:
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # a kernel before 5.3, or a sandbox that does not know the call
        return -1


def _open_terminal(size: TerminalSize) -> tuple[int, int]:
    ours, theirs = os.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST  # the real terminal does the output processing, once
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    _set_size(theirs, size)
    return ours, theirs


def _set_size(fd: int, size: TerminalSize) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))


def _has_exited(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # see `_exit_code`
        return True


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process that has exited; None if somebody else had it: the kernel, where the program ignores
    SIGCHLD, or the program, where it waits for any child."""
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        process.wait()  # returns 0
        return None
    return process.wait()


_UNHEARD = crash_report.CrashReport(
    kind="ChildProcessError",
    message="it did not come to its end (its exit code is unknown: the program ignores SIGCHLD or waits for any child)",
    traceback="",
)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _signal(pid: int, number: int) -> None:
    """Not by `Popen.send_signal`, which reaps a process that has just ended, before its end was noticed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
        return


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
