"""What happens in a job, as values: the one stream behind `events.jsonl`, `phalanx status`, `top`, the dashboard and
the report. The launcher records them; `job_view` says what they mean. Times are seconds since 1970.
"""

from __future__ import annotations

import msgspec

from phalanx.monitoring.worker_figures import TaskReport

EVENTS_FILE = "events.jsonl"
"""In the log directory of a job: one event per line."""

FIXED, ELASTIC, SERVERS = "fixed", "elastic", "parameter servers"
"""The kinds of jobs."""


class JobStarted(msgspec.Struct, frozen=True, tag="job_started"):
    """The launcher is about to start the tasks; again, if it restarts the whole job.

    Attributes:
        job: ID of the job.
        program: Command line of the program.
        kind: FIXED, ELASTIC or SERVERS.
        tasks: names of all tasks, in rank order.
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
    """These tasks, in rank order, train together from now on."""

    at: float
    generation: int
    tasks: list[str]


class HostStatus(msgspec.Struct, frozen=True):
    """A host on which workers may run.

    Attributes:
        slots, taken: the number of workers that it can run, and that it runs.
        blacklisted_until: when it is used again, if it is blacklisted.
        reason: why it is.
        is_drained: whether a user has withdrawn it.
    """

    name: str
    slots: int
    taken: int
    blacklisted_until: float | None = None
    reason: str = ""
    is_drained: bool = False


class HostsChanged(msgspec.Struct, frozen=True, tag="hosts_changed"):
    """The hosts of the job."""

    at: float
    hosts: list[HostStatus]


class StragglersChanged(msgspec.Struct, frozen=True, tag="stragglers_changed"):
    """The others wait for these tasks."""

    at: float
    tasks: list[str]


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """The activity of the tasks that have reported anything new; about once a second."""

    at: float
    reports: dict[str, TaskReport]


class WorkersRequested(msgspec.Struct, frozen=True, tag="workers_requested"):
    """A user has requested another number of workers."""

    at: float
    workers: int


class EpochFinished(msgspec.Struct, frozen=True, tag="epoch_finished"):
    """The logs of an epoch, with those of its validation.

    Attributes:
        epoch: its index, from 0.
        steps: training steps since the job began.
    """

    at: float
    epoch: int
    logs: dict[str, float | None]
    steps: int = 0


class CheckpointWritten(msgspec.Struct, frozen=True, tag="checkpoint_written"):
    """A checkpoint is complete."""

    at: float
    step: int
    path: str


class Noticed(msgspec.Struct, frozen=True, tag="noticed"):
    """The launcher has told the user this line."""

    at: float
    text: str


class JobEnded(msgspec.Struct, frozen=True, tag="job_ended"):
    """All tasks have exited, and the job is not started again.

    Attributes:
        code: its exit code.
        reason: why, in one sentence.
        task: the task that was the cause; empty if none was.
        page: the failure report; empty if the job has succeeded, or someone has stopped it.
        folded: the same without the frames of libraries.
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
