"""The events of a job: the one stream behind `events.jsonl`, `phalanx status`, `top`, the dashboard and the report. The
launcher records them; `job_view` interprets them. Times are seconds since 1970.
"""

from __future__ import annotations

import msgspec

from phalanx.monitoring.worker_figures import TaskReport

EVENTS_FILE = "events.jsonl"
"""File in the log directory of a job, with one event per line."""

FIXED, ELASTIC, SERVERS = "fixed", "elastic", "parameter servers"
"""Kinds of jobs."""


class JobStarted(msgspec.Struct, frozen=True, tag="job_started"):
    """The launcher is about to start the tasks, or to restart the whole job.

    Attributes:
        job: ID of the job.
        program: Command line of the program.
        kind: FIXED, ELASTIC or SERVERS.
        tasks: Names of all tasks in rank order.
        minimum, maximum: Bounds on the number of workers.
        host, pid: Host and process of the launcher.
        version: Phalanx version.
        log_dir: Folder of the tasks' logs; empty if there are none.
    """

    at: float
    job: str
    program: str
    kind: str
    tasks: list[str]
    minimum: int
    maximum: int
    host: str
    pid: int
    version: str
    log_dir: str = ""


class TaskStarted(msgspec.Struct, frozen=True, tag="task_started"):
    """A process of a task was started, for the first time or again."""

    at: float
    task: str
    rank: int
    host: str
    pid: int


class TaskExited(msgspec.Struct, frozen=True, tag="task_exited"):
    """A process of a task has exited.

    Attributes:
        code: Exit code as a shell reports it.
        how: Explanation of the code.
        by_launcher: Whether the launcher ended the process.
    """

    at: float
    task: str
    code: int
    how: str
    by_launcher: bool = False


class GenerationFormed(msgspec.Struct, frozen=True, tag="generation_formed"):
    """A generation begins. Its tasks are in rank order."""

    at: float
    generation: int
    tasks: list[str]


class HostStatus(msgspec.Struct, frozen=True):
    """A host on which workers may run.

    Attributes:
        slots, taken: Number of workers that the host can run, and that it runs.
        blacklisted_until: Time at which a blacklisted host is used again; None if it is not blacklisted.
        reason: Why the host is blacklisted.
        is_drained: Whether a user has drained the host.
    """

    name: str
    slots: int
    taken: int
    blacklisted_until: float | None = None
    reason: str = ""
    is_drained: bool = False


class HostsChanged(msgspec.Struct, frozen=True, tag="hosts_changed"):
    """The hosts of the job have changed."""

    at: float
    hosts: list[HostStatus]


class StragglersChanged(msgspec.Struct, frozen=True, tag="stragglers_changed"):
    """The set of stragglers has changed: the other tasks wait for these."""

    at: float
    tasks: list[str]


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """Activity of the tasks that have sent a new report, recorded about once a second."""

    at: float
    reports: dict[str, TaskReport]


class WorkersRequested(msgspec.Struct, frozen=True, tag="workers_requested"):
    """A user has requested a different number of workers."""

    at: float
    workers: int


class EpochFinished(msgspec.Struct, frozen=True, tag="epoch_finished"):
    """The logs of an epoch, including those of its validation.

    Attributes:
        epoch: Index of the epoch, starting at 0.
        steps: Training steps since the job began.
    """

    at: float
    epoch: int
    logs: dict[str, float | None]
    steps: int = 0


class CheckpointWritten(msgspec.Struct, frozen=True, tag="checkpoint_written"):
    """A checkpoint has been written."""

    at: float
    step: int
    path: str


class Noticed(msgspec.Struct, frozen=True, tag="noticed"):
    """The launcher has shown a line to the user."""

    at: float
    text: str


class JobEnded(msgspec.Struct, frozen=True, tag="job_ended"):
    """All tasks have exited, and the job is not restarted.

    Attributes:
        code: Exit code of the job.
        reason: Why the job ended, in one sentence.
        task: Task that was the cause; empty if there was none.
        page: Failure report; empty if the job succeeded or a user stopped it.
        folded: The failure report without stack frames of libraries.
    """

    at: float
    code: int
    reason: str
    task: str = ""
    page: str = ""
    folded: str = ""


JobEvent = (
    JobStarted
    | TaskStarted
    | TaskExited
    | GenerationFormed
    | HostsChanged
    | StragglersChanged
    | Measured
    | WorkersRequested
    | EpochFinished
    | CheckpointWritten
    | Noticed
    | JobEnded
)
