"""What passes between a job and the hosts of its workers, and through ssh between launcher and agent."""

from __future__ import annotations

import msgspec

from phalanx.runtime.crash_report import CrashReport

STOPPED = "T"
"""The kernel's word for a process that was stopped by a signal."""


class CrashReported(msgspec.Struct, frozen=True):
    """What is known of a worker's end.

    Attributes:
        phase, epoch, step: its last progress report; None if there was none.
        age_s: seconds between that report and its end.
        state: the kernel's word for what it did when its stacks were asked for (`R`unning, `S`leeping,
            `D`isk,
            `T` stopped); empty if they were not.
        stacks: the Python stacks of its threads, if they were asked for or native code crashed.
        error: the uncaught error that ended it.
        output: where it failed without one, the last lines that it wrote to its standard error, or to both outputs
            where they are one.
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
        """The task that was lost, or did not answer, if there is an error and it names one."""
        return None if self.error is None else self.error.lost or self.error.silent


# From a host to the job.


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Bytes that a worker wrote; `error` says to stderr. Several lines, or a part of one."""

    rank: int
    error: bool
    data: bytes


class Started(msgspec.Struct, frozen=True, tag="started"):
    rank: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A worker's end. `returncode` is negative for a signal, and None if its host was lost with it.

    `result` is the pickled result of a worker that ran a function.
    """

    rank: int
    returncode: int | None
    words: CrashReported
    result: bytes = b""


class CheckpointBeforeExit(msgspec.Struct, frozen=True, tag="heeding"):
    """A worker that was told to end takes a checkpoint first."""

    rank: int


class StepTimingReported(msgspec.Struct, frozen=True, tag="paced"):
    """How a worker of a job of fixed size goes, about once a second.

    Attributes:
        computed_s, waited_s: seconds since it began, outside of collectives and in them.
        steps: since it began.
    """

    rank: int
    computed_s: float
    waited_s: float
    steps: int


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The ports that a host holds open for its workers, in the order of their ranks."""

    ports: list[int]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The host cannot do what it was asked."""

    reason: str


Event = Output | Started | Exited | CheckpointBeforeExit | StepTimingReported


# From the launcher to an agent.


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Open ports for this many workers (more) on all addresses, and start them in `folder` later."""

    workers: int
    folder: str


class HostOrder(msgspec.Struct, frozen=True):
    """One task to start: its number, its program's command line, its own environment variables.

    Attributes:
        trains: whether it has a replica, and so gets cores and GPUs of its own.
        returns: whether it may be started again, at the same port.
        keeps: whether it writes snapshots, into files that outlive it.
        slot: which of the host's ports it gets, and which share of its cores; None: that of its place in the list.
        folder: where it starts; None: where the launcher is.
        owns_port: whether nobody is started at its port any more when it has ended well.
    """

    rank: int
    arguments: tuple[str, ...]
    environment: dict[str, str]
    interpreter: tuple[str, ...] = ()
    function: bytes = b""
    trains: bool = True
    returns: bool = False
    keeps: bool = False
    slot: int | None = None
    folder: str | None = None
    owns_port: bool = False


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start tasks, all at once or, in a job whose members come and go, some at a time."""

    orders: list[HostOrder]


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """Start a task again that has ended, as it was started first."""

    rank: int


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    rank: int
    number: int


class DumpStacks(msgspec.Struct, frozen=True, tag="dump-stacks"):
    rank: int


Command = Prepare | Start | Restart | Signal | DumpStacks
Answer = Output | Started | Exited | CheckpointBeforeExit | StepTimingReported | Prepared | Refused
