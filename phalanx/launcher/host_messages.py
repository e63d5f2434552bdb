"""What passes between a job and the hosts of its workers, and through ssh between launcher and agent."""

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
        phase, epoch, step: its last progress report; None if there was none.
        age_s: seconds between that report and its exit.
        state: the kernel's letter for what it did when its stacks were requested (`R` running, `S` sleeping, `D`
            waiting for a disk, `T` stopped); empty if they were not.
        stacks: the Python stacks of its threads, if they were requested or native code crashed.
        error: the uncaught error that ended it.
        output: if it failed without one, the last lines that it wrote to stderr, or to both outputs where they are one.
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
        """The task that was lost or did not answer, if there is an error and it names one."""
        return None if self.error is None else self.error.lost or self.error.silent


# From a host to the job.


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Bytes that a worker wrote: several lines, or a part of one."""

    rank: int
    is_error: bool
    data: bytes


class Started(msgspec.Struct, frozen=True, tag="started"):
    rank: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A worker's process has exited.

    Attributes:
        returncode: negative for a signal; None if the worker was lost with its host.
        result: pickled; of a worker that ran a function.
    """

    rank: int
    returncode: int | None
    diagnostics: WorkerDiagnostics
    result: bytes = b""


class CheckpointBeforeExit(msgspec.Struct, frozen=True, tag="checkpoint"):
    """A worker that received SIGTERM saves a checkpoint first."""

    rank: int


class WorkerReport(msgspec.Struct, frozen=True, tag="report"):
    """The present activity of the worker of this rank."""

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

KEEP_ALIVE_S = 5.0
"""How often the launcher shows an agent that it is there."""
SILENCE_S = SILENT_HOST_S
"""Without a command for so long, the launcher or the network is down. As long as a link takes to find a silent host."""


class KeepAlive(msgspec.Struct, frozen=True, tag="keep_alive"):
    """The launcher is there, and the job still its own."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Open ports for this many more workers at `address` (see `ports.listen_at`), and start them in `directory`
    later."""

    workers: int
    directory: str
    address: str | None = None


class WorkerSpec(msgspec.Struct, frozen=True):
    """One task to start.

    Attributes:
        arguments: its program's command line, as after `python`.
        environment: the variables that make it this task.
        interpreter: options of the interpreter itself.
        function: pickled; run instead of a program.
        trains: whether it has a replica of the model, and so gets cores and GPUs of its own.
        devices: how many GPUs, or CPU devices of JAX, each worker of the job has; None: one GPU.
        restartable: whether it may be restarted, at the same port.
        has_snapshots: whether it writes snapshots, into files that outlive it.
        slot: which of the host's ports and shares of cores it gets; None: that of its position in the list.
        directory: where it starts; None: where the launcher is.
        frees_port: whether its port is closed once it has exited successfully.
        prints_errors: whether it prints the error that ends it; otherwise the launcher shows it.
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
    """Start tasks: all of the host at once, or in an elastic job some at a time."""

    specs: list[WorkerSpec]


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """Start a task again that has exited, with its first spec."""

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
    """Bytes in, whole lines out: one JSON message each between launcher and agent."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line.strip()]
