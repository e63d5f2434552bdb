"""What a job reports while it runs, to whatever shows it."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.launcher.host_messages import StepTimingReported
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.launcher.root_cause import WorkerExit


class JobObserver:
    """Ignores everything; subclasses override what they show. All calls come from the thread that runs the job."""

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        """A task wrote to stdout or stderr."""

    def started(self, placement: WorkerPlacement, pid: int) -> None:
        """A process of a task was started, for the first time or again."""

    def exited(self, end: WorkerExit) -> None:
        """A process of a task has exited."""

    def step_timing(self, task: str, timing: StepTimingReported) -> None:
        """How fast a worker of a job of fixed size runs, about once a second."""

    def restarting(self, end: WorkerExit, count: str) -> None:
        """A task is restarted; `count` says how often so far."""

    def failed(self, end: WorkerExit) -> None:
        """The first failure, because of which the job is being ended."""

    def interrupted(self, number: int) -> None:
        """The launcher received this signal, because of which the job is being ended."""

    def left_behind(self, end: WorkerExit) -> None:
        """A worker among servers has lost them and is not restarted; the others continue without it."""

    def overdue(self, tasks: Sequence[str], seconds: float) -> None:
        """These tasks still run so long after the training, and are being ended."""
