"""A job that can be observed: its events, its entry in the registry of running jobs, and its control socket."""

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
    """A context manager that lasts as long as the launcher runs the job, including restarts.

    Args:
        request: The job.
        show_line: Shows a line to the user.
        events: File for all events; None to write none.

    Attributes:
        job: Id of the job, as shown by `phalanx status`.
        recorder: Records the events of the job.
    """

    def __init__(self, request: JobRequest, show_line: Callable[[str], None], events: BinaryIO | None = None):
        self._show_line = show_line
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
            # Last, because the dashboard connects to the socket above.
            if self._request.dashboard is not None:
                dashboard = DashboardProcess(self.job, control=self._request.dashboard.control)
                stack.enter_context(dashboard)
                self._show_line(f"phalanx: dashboard: {dashboard.address}")
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

    def record_start(self) -> None:
        """Record that the job is about to start or restart."""
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
        """Allow users to control this run of the job, inside the block.

        Args:
            job: Supervises the tasks.
            pool, membership: Hosts and members of an elastic job.
        """
        if self._control is not None:
            self._control.job = RunningJob(job, pool, membership)
        try:
            yield
        finally:
            if self._control is not None:
                self._control.job = None

    def record_outcome(self, outcome: JobOutcome) -> None:
        """Record the end of the job, with a failure report unless it succeeded or the user ended it."""
        root_cause = outcome.root_cause
        task = "" if root_cause.cause is None else root_cause.cause.task
        pages = []
        if not root_cause.success and not root_cause.was_requested:
            pages = [self._failure_page(outcome, fold=fold) for fold in (False, True)]
        self._record_end(root_cause.code, root_cause.reason, task, *pages)

    def _failure_page(self, outcome: JobOutcome, *, fold: bool) -> str:
        log_dir = self._request.config.log_dir
        page = failure_report.render(outcome.root_cause, outcome.exits, log_dir=log_dir, fold=fold)
        return failure_report.without_missing_files(page, log_dir)

    def _record_end(self, code: int, reason: str, task: str = "", page: str = "", folded: str = "") -> None:
        self.recorder.record(events.JobEnded(time.time(), code, reason, task, page, folded))
