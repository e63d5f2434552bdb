"""Messages between a job and the hosts of its workers, and over ssh between launcher and agent."""

from __future__ import annotations

import msgspec

from phalanx.monitoring.worker_figures import TaskReport
from phalanx.runtime.crash_report import CrashReport
from phalanx.transport.dead_peers import SILENT_HOST_S

STOPPED = "T"
"""The kernel's letter for a process that was stopped by a signal."""


class WorkerDiagnostics(msgspec.Struct, frozen=True):
    """The evidence of how a worker ended.

    Attributes:
        phase, epoch, step: Its last progress report; None if there was none.
        age_s: Seconds between that report and its exit.
        state: The kernel's letter for its state when its stacks were requested (`R` running, `S` sleeping, `D` waiting
            for a disk, `T` stopped); empty if they were not.
        stacks: The Python stacks of its threads, if they were requested or native code crashed.
        error: The uncaught error that ended it.
        output: If it failed without an error, the last lines of its stderr, or of both outputs if they are merged.
    """

    phase: str | None = None
    epoch: int | None = None
    step: int | None = None
    age_s: float = 0.0
    state: str = ""
    stacks: str = ""
    error: CrashReport | None = None
    output: str = ""

    @property
    def missed(self) -> str | None:
        """The task that was lost or did not answer, if there is an error that names one."""
        return None if self.error is None else self.error.lost or self.error.silent


# From a host to the job.


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Bytes that a worker wrote: several lines, or part of one."""

    rank: int
    is_error: bool
    data: bytes


class Started(msgspec.Struct, frozen=True, tag="started"):
    rank: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A worker's process has exited.

    Attributes:
        returncode: Negative for a signal; None if the worker was lost with its host.
        result: Pickled result of a worker that ran a function.
    """

    rank: int
    returncode: int | None
    diagnostics: WorkerDiagnostics
    result: bytes = b""


class CheckpointBeforeExit(msgspec.Struct, frozen=True, tag="checkpoint"):
    """A worker that received SIGTERM saves a checkpoint before it exits."""

    rank: int


class WorkerReport(msgspec.Struct, frozen=True, tag="report"):
    """The current activity of a worker."""

    rank: int
    report: TaskReport


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The ports that a host holds open for its workers, in the order of their ranks."""

    ports: list[int]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The host cannot do what was requested."""

    reason: str


Event = Output | Started | Exited | CheckpointBeforeExit | WorkerReport


# From the launcher to an agent.

HEARTBEAT_S = 5.0
"""Interval of the launcher's heartbeats to an agent."""
LEASE_S = SILENT_HOST_S
"""Without a command for this long, the launcher or the network is down. Links detect a silent host in the same time."""


class KeepAlive(msgspec.Struct, frozen=True, tag="keep_alive"):
    """Heartbeat: the launcher is alive and still runs the job."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Open ports for this many more workers at `address` (see `ports.listen_at`), and start them in `directory`
    later."""

    workers: int
    directory: str
    address: str | None = None


class WorkerSpec(msgspec.Struct, frozen=True):
    """One task to start.

    Attributes:
        arguments: Its program's command line, as after `python`.
        environment: The variables that make it this task.
        interpreter: Options of the Python interpreter.
        function: Pickled function to run instead of a program.
        trains: Whether it has a replica of the model, and therefore its own cores and GPUs.
        devices: Number of GPUs, or CPU devices of JAX, for each worker of the job; None: one GPU.
        restartable: Whether it may be restarted, at the same port.
        has_snapshots: Whether it writes snapshots, into files that outlive it.
        slot: Index of its port and share of cores on the host; None: its position in the list.
        directory: Its working directory; None: that of the launcher.
        frees_port: Whether its port is closed once it has exited successfully.
        prints_errors: Whether it prints the error that ends it; otherwise the launcher shows it.
    """

    rank: int
    arguments: tuple[str, ...]
    environment: dict[str, str]
    interpreter: tuple[str, ...] = ()
    function: bytes = b""
    trains: bool = True
    devices: int | None = None
    restartable: bool = False
    has_snapshots: bool = False
    slot: int | None = None
    directory: str | None = None
    frees_port: bool = False
    prints_errors: bool = True


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start tasks: all of the host or, in an elastic job, some at a time."""

    specs: list[WorkerSpec]


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """Restart a task that has exited, with its original spec."""

    rank: int


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    rank: int
    number: int


class DumpStacks(msgspec.Struct, frozen=True, tag="dump-stacks"):
    rank: int


class RequestCheckpoint(msgspec.Struct, frozen=True, tag="request-checkpoint"):
    """Ask a worker for a checkpoint, which it writes after the next step."""

    rank: int


Command = Prepare | Start | Restart | Signal | DumpStacks | RequestCheckpoint | KeepAlive
Answer = Output | Started | Exited | CheckpointBeforeExit | WorkerReport | Prepared | Refused


class LineReader:
    """Splits bytes into whole lines, each a JSON message between launcher and agent."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line.strip()]
