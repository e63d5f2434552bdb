"""What a job reports while it runs, to whatever shows it."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.launcher.host_messages import WorkerReport
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.launcher.root_cause import WorkerExit
from phalanx.monitoring.job_events import HostStatus


class JobObserver:
    """Ignores everything; subclasses override what they show. All calls come from the thread that runs the job."""

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        """A task wrote to stdout or stderr."""

    def started(self, placement: WorkerPlacement, pid: int) -> None:
        """A process of a task was started, for the first time or again."""

    def exited(self, end: WorkerExit) -> None:
        """A process of a task has exited."""

    def reported(self, task: str, report: WorkerReport) -> None:
        """What a task does, about twice a second."""

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None:
        """In an elastic job: these tasks train together from now on."""

    def hosts_changed(self, hosts: Sequence[HostStatus]) -> None:
        """In an elastic job: the hosts on which workers may run."""

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

    def noticed(self, text: str) -> None:
        """Anything else that the user should know, as one line."""


class ObserverGroup(JobObserver):
    """Passes everything to several observers, in their order."""

    def __init__(self, *observers: JobObserver):
        self._observers = observers

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        for each in self._observers:
            each.output(rank, is_error, data)

    def started(self, placement: WorkerPlacement, pid: int) -> None:
        for each in self._observers:
            each.started(placement, pid)

    def exited(self, end: WorkerExit) -> None:
        for each in self._observers:
            each.exited(end)

    def reported(self, task: str, report: WorkerReport) -> None:
        for each in self._observers:
            each.reported(task, report)

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None:
        for each in self._observers:
            each.generation_formed(generation, tasks)

    def hosts_changed(self, hosts: Sequence[HostStatus]) -> None:
        for each in self._observers:
            each.hosts_changed(hosts)

    def restarting(self, end: WorkerExit, count: str) -> None:
        for each in self._observers:
            each.restarting(end, count)

    def failed(self, end: WorkerExit) -> None:
        for each in self._observers:
            each.failed(end)

    def interrupted(self, number: int) -> None:
        for each in self._observers:
            each.interrupted(number)

    def left_behind(self, end: WorkerExit) -> None:
        for each in self._observers:
            each.left_behind(end)

    def overdue(self, tasks: Sequence[str], seconds: float) -> None:
        for each in self._observers:
            each.overdue(tasks, seconds)

    def noticed(self, text: str) -> None:
        for each in self._observers:
            each.noticed(text)
