"""One job that others may watch: its events, its place in the list of running jobs, and the socket that answers."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from phalanx.config.task_names import trains
from phalanx.errors import SIGNAL_BASE, PhalanxError
from phalanx.launcher.dashboard_process import DashboardProcess
from phalanx.launcher.failures import failure_report
from phalanx.launcher.job_request import JobRequest
from phalanx.launcher.job_supervisor import JobOutcome, JobSupervisor
from phalanx.launcher.watching.job_control import JobControl, RunningJob
from phalanx.launcher.watching.job_recorder import JobRecorder
from phalanx.launcher.watching.job_registry import registered, socket_path
from phalanx.monitoring import job_events as events
from phalanx.version import __version__

if TYPE_CHECKING:
    from phalanx.elastic.coordinator_server import CoordinatorServer
    from phalanx.launcher.elastic_hosts.host_pool import HostPool


class WatchedJob:
    """Lasts as long as the launcher runs the job, restarts included. A context manager.

    Args:
        request: the job.
        say: shows a line to the user.
        events: the file for all events; None to write none.

    Attributes:
        job: its id, as `phalanx status` shows it.
        recorder: records what happens.
    """

    def __init__(self, request: JobRequest, say: Callable[[str], None], events: BinaryIO | None = None):
        self._say = say
        self.job = secrets.token_hex(4)
        self._request = request
        self._stack = contextlib.ExitStack()
        self.recorder = JobRecorder(events)
        self._control: JobControl | None = None

    def __enter__(self) -> WatchedJob:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(RuntimeError):  # a user without a home
                stack.enter_context(registered(self.job, self._request.arguments))
                self._control = stack.enter_context(JobControl(socket_path(self.job), self.recorder))
            # Last: the dashboard asks the socket above for the job.
            if self._request.dashboard is not None:
                dashboard = DashboardProcess(self.job, control=self._request.dashboard.control)
                stack.enter_context(dashboard)
                self._say(f"phalanx: dashboard: {dashboard.address}")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            code = error.exit_code if isinstance(error, PhalanxError) else 1
            code = SIGNAL_BASE + signal.SIGINT if isinstance(error, KeyboardInterrupt) else code
            self._record_end(code, str(error) or type(error).__name__)
        self._stack.close()

    def begin(self) -> None:
        """The job is about to start, or to start again."""
        request, elastic = self._request, self._request.elastic
        has_servers = any(task.startswith("ps/") for task in request.tasks)
        workers = sum(map(trains, request.tasks))
        self.recorder.record(
            events.JobStarted(
                time.time(),
                self.job,
                " ".join(request.arguments),
                events.SERVERS if has_servers else events.FIXED if elastic is None else events.ELASTIC,
                list(request.tasks),
                workers if elastic is None else elastic.minimum,
                workers,
                socket.gethostname(),
                os.getpid(),
                __version__,
                "" if request.config.log_dir is None else str(request.config.log_dir.absolute()),
            )
        )

    @contextlib.contextmanager
    def controlled(
        self, job: JobSupervisor, pool: HostPool | None = None, membership: CoordinatorServer | None = None
    ) -> Iterator[None]:
        """While inside, users may control this run of the job.

        Args:
            job: the tasks.
            pool, membership: the hosts and the members of an elastic job.
        """
        if self._control is not None:
            self._control.job = RunningJob(job, pool, membership)
        try:
            yield
        finally:
            if self._control is not None:
                self._control.job = None

    def end(self, outcome: JobOutcome) -> None:
        """The job has ended. There is nothing to explain where it succeeded, or where the user has ended it."""
        verdict = outcome.verdict
        task = "" if verdict.cause is None else verdict.cause.task
        pages = []
        if not verdict.success and not verdict.was_requested:
            pages = [self._failure_page(outcome, fold=fold) for fold in (False, True)]
        self._record_end(verdict.code, verdict.reason, task, *pages)

    def _failure_page(self, outcome: JobOutcome, *, fold: bool) -> str:
        log_dir = self._request.config.log_dir
        page = failure_report.render(outcome.verdict, outcome.ends, log_dir=log_dir, fold=fold)
        return failure_report.without_missing_files(page, log_dir)

    def _record_end(self, code: int, reason: str, task: str = "", page: str = "", folded: str = "") -> None:
        self.recorder.record(events.JobEnded(time.time(), code, reason, task, page, folded))
