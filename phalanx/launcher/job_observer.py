"""The interface to which a running job reports its events, for display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from phalanx.launcher.failures.root_cause import WorkerExit
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.monitoring.job_events import HostStatus
from phalanx.monitoring.worker_figures import TaskReport


class JobObserver:
    """Ignores everything; subclasses override what they need. All calls come from the thread that runs the job."""

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        """A task wrote to stdout or stderr."""

    def task_started(self, placement: WorkerPlacement, pid: int) -> None:
        """A process of a task was started, for the first time or again."""

    def task_exited(self, exit_: WorkerExit) -> None:
        """A process of a task has exited."""

    def task_reported(self, task: str, rank: int, report: TaskReport) -> None:
        """A task reported its current activity, about twice a second."""

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None:
        """In an elastic job, these tasks form the new generation."""

    def hosts_changed(self, hosts: Sequence[HostStatus]) -> None:
        """In an elastic job, the hosts on which workers may run have changed."""

    def job_failed(self, exit_: WorkerExit) -> None:
        """The first failure occurred, and the job is shutting down because of it."""

    def shutdown_started(self) -> None:
        """The launcher has received a signal, and the job is shutting down because of it."""

    def exit_survived(self, exit_: WorkerExit, how: str) -> None:
        """The job continues after the exit of a task, as `how` describes. No failure report will explain the exit."""

    def message(self, text: str) -> None:
        """Any other message for the user, as one line."""


class ObserverGroup(JobObserver):
    """Passes all reports to several observers, in order."""

    def __init__(self, *observers: JobObserver):
        for name in vars(JobObserver):
            if not name.startswith("_"):
                setattr(self, name, partial(_report_to_all, [getattr(each, name) for each in observers]))


def _report_to_all(reports: Sequence[Callable[..., None]], *args: Any) -> None:
    for report in reports:
        report(*args)
