"""Runs a job for `phalanx run`: on this terminal, from its start to its exit code."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import resource
import secrets
import selectors
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.config.environment import allows_color, set_variables
from phalanx.config.job_config import JobConfig
from phalanx.errors import ConfigurationError, PeerLostError, PreemptedError, RendezvousError
from phalanx.launcher.elastic_hosts.elastic_supervisor import ElasticSupervisor
from phalanx.launcher.elastic_hosts.host_pool import ElasticOptions, HostPool
from phalanx.launcher.failures import failure_report
from phalanx.launcher.failures.root_cause import INTERRUPTED_CODE
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.launcher.hosts.local_host import LocalHost
from phalanx.launcher.hosts.output_streams import OutputStreams, TerminalSize
from phalanx.launcher.job_observer import ObserverGroup
from phalanx.launcher.job_reporter import JobReporter
from phalanx.launcher.job_request import JobRequest
from phalanx.launcher.job_size import describe_start
from phalanx.launcher.job_supervisor import JobOutcome, JobSupervisor
from phalanx.launcher.log_directory import open_logs
from phalanx.launcher.orphan_reaper import adopt_orphans, end_orphans
from phalanx.launcher.restart_policy import EARLY_FAILURE_S, RestartPolicy
from phalanx.launcher.stop_signals import stop_signals, stopped_by_signals
from phalanx.launcher.task_table import SERVERS
from phalanx.launcher.watching.watched_job import WatchedJob
from phalanx.launcher.worker_placement import WorkerTemplate, place
from phalanx.monitoring.console import Console, prefixes, width
from phalanx.monitoring.startup_noise import LOUD

if TYPE_CHECKING:
    from phalanx.elastic.coordinator_server import CoordinatorServer

# Delay before the launcher retries hosts that did not answer.
HOST_RETRY_S = 10.0
# Open files of this process: its own, and those of each task on this host (pipes, progress file, port, ...).
OWN_FILES = 32
FILES_PER_TASK = 8
# A progress bar needs this many columns. On narrower terminals, wrapped lines are the lesser evil.
MIN_COLUMNS = 20
DETAILS_HINT = "All frames, and the errors of the other tasks: phalanx run -v, or --log-dir"


def run_job(job: JobRequest) -> int:
    """Run a job and return its exit code.

    Must be called in the main thread, whose signals it handles until it returns. Processes that descendants of this
    process leave behind are killed; children that already exist are left alone.
    """
    signals = stop_signals(job.config)
    adopt_orphans()  # before anything is started: children that already exist are spared
    if job.config.verbose:
        set_variables(LOUD, overwrite=False)  # inherited by workers, on other hosts too
    _raise_file_limit(len(job.tasks))
    log_dir = job.config.log_dir
    with open_logs(log_dir, job.tasks) as logs, contextlib.ExitStack() as stack:
        is_terminal = sys.stdout.isatty()
        console = Console(
            job.tasks,
            sys.stdout,
            sys.stdout if os.path.samestat(os.fstat(1), os.fstat(2)) else sys.stderr,
            columns=shutil.get_terminal_size().columns if is_terminal else None,
            color=is_terminal and allows_color(),
            logs=logs.outputs,
            quiet=not job.config.verbose,
        )
        watched = stack.enter_context(WatchedJob(job, console.message, logs.events))
        start = describe_start(job.tasks, len(job.host_specs), at_most=job.elastic is not None, reason=job.size_reason)
        console.message(f"phalanx: {start}")

        def show_line(text: str) -> None:
            console.message(f"phalanx: {text}")
            watched.recorder.message(text)

        try:
            run = secrets.token_hex(8)
            outcome = _run_with_restarts(
                lambda attempt: _run_once(job, console, watched, signals, f"{run}:{attempt}"),
                show_line,
                job.config.max_restarts,
            )
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ConfigurationError(
                f"The tasks of this host need more open files than the {limit} that this process may have. Raise the "
                f"limit (`ulimit -n`) to about {_needed_files(len(job.tasks))}, or start fewer tasks here."
            ) from error
        finally:
            console.close()
        _report_failure(outcome, job, console, color=sys.stderr.isatty() and allows_color())
        watched.record_outcome(outcome)
    if log_dir is not None and outcome.root_cause.code != INTERRUPTED_CODE:  # Ctrl-C prints one line only
        console.message(f"phalanx: `phalanx report {shlex.quote(str(log_dir))}` makes a page of this job")
    return outcome.root_cause.code


def _report_failure(outcome: JobOutcome, job: JobRequest, console: Console, *, color: bool) -> None:
    root_cause, config = outcome.root_cause, job.config
    if root_cause.success:
        return
    if root_cause.code == PreemptedError.exit_code and root_cause.cause is None:
        console.message(f"phalanx: {_preemption_message(outcome)} (exit code {root_cause.code})")
        return
    is_interrupt = root_cause.code == INTERRUPTED_CODE
    if is_interrupt and not root_cause.was_requested and not config.verbose:  # in a worker, not in the terminal
        console.message(f"phalanx: {root_cause.reason} (exit code {root_cause.code})")
    elif not is_interrupt or config.verbose:  # after Ctrl-C, the user knows why the job ended
        page = failure_report.render(
            root_cause,
            outcome.exits,
            log_dir=config.log_dir,
            full=config.verbose,
            color=color,
            hint="" if config.verbose else DETAILS_HINT,
        )
        console.message(page)
    if config.log_dir is not None:
        try:
            failure_report.write(config.log_dir, root_cause, outcome.exits)
        except OSError as error:
            console.message(f"phalanx: this report cannot be written to {config.log_dir}: {error.strerror}")


def _preemption_message(outcome: JobOutcome) -> str:
    """The last message of a preempted job: its chief's, which describes what was saved."""
    preempted = [exit_ for exit_ in outcome.exits if exit_.was_preempted]
    error = min(preempted, key=lambda exit_: exit_.rank).diagnostics.error if preempted else None
    return outcome.root_cause.reason if error is None else error.message.rstrip(".")


def _run_with_restarts(
    run_once: Callable[[int], JobOutcome], show_line: Callable[[str], None], max_restarts: int
) -> JobOutcome:
    """Run the job. After a failure, restart all of it as long as that may help.

    Args:
        run_once: Runs the job; takes the number of earlier attempts.
        show_line: Shows a line to the user and to those who watch the job.
        max_restarts: Maximum number of restarts.
    """
    policy = RestartPolicy(max_restarts, elastic=True)  # rank 0 represents the job; a host may cause its error
    has_run = False  # whether an attempt has found its hosts
    attempts = itertools.count()
    while True:
        started_at = time.monotonic()
        try:
            outcome = run_once(next(attempts))
        except RendezvousError as error:
            # Hosts that were available before may return; after a power cut that takes minutes. This counts as a
            # restart after a loss, because the exit code of the error itself excludes another attempt.
            if not has_run or policy.delay_s(0, PeerLostError.exit_code, EARLY_FAILURE_S) is None:
                raise
            show_line(f"{error} Trying to start the job again ({policy.describe(0)})")
            time.sleep(HOST_RETRY_S)
            continue
        has_run = True
        root_cause = outcome.root_cause
        has_failed = not root_cause.success and not root_cause.was_requested
        uptime_s = time.monotonic() - started_at
        delay_s = policy.delay_s(0, root_cause.code, uptime_s) if has_failed else None
        if delay_s is None:
            if has_failed and max_restarts:
                show_line(f"the job is not started again, after {policy.describe(0)} restarts")
            return outcome
        show_line(f"{root_cause.reason}. Starting the whole job again ({policy.describe(0)})")
        time.sleep(delay_s)


def _run_once(
    request: JobRequest, console: Console, watched: WatchedJob, signals: Sequence[signal.Signals], run: str
) -> JobOutcome:
    watched.record_start()
    with contextlib.ExitStack() as stack:
        return _JobRun(request, console, watched, stack, run).run(signals)


class _JobRun:
    """One run of the job: its output, and the selector that wakes the launcher. `--max-restarts` allows several runs.

    Args:
        stack: Closes what the run has opened.
        run: See `WorkerTemplate`.
    """

    def __init__(
        self, request: JobRequest, console: Console, watched: WatchedJob, stack: contextlib.ExitStack, run: str
    ):
        self._request, self._console, self._watched, self._stack = request, console, watched, stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._observer = ObserverGroup(_reporter(request, console, watched), watched.recorder)
        self._prefix_columns = width(prefixes(request.tasks, color=False)[0])
        restartable = request.config.restarts > 0
        self._template = WorkerTemplate(
            request.arguments, request.tasks, request.config, restartable=restartable, run=run, prints_errors=False
        )

    def run(self, signals: Sequence[signal.Signals]) -> JobOutcome:
        """Start the tasks, and return when all have exited."""
        elastic, attach = self._request.elastic, None
        if elastic is None:
            streams = self._streams()
            job = self._job(
                place(self._request.host_specs, self._template, self._selector, streams, self._console.message)
            )
        elif self._request.is_single_program:
            job = self._single_program_job(elastic)
        else:
            job, attach = self._elastic_job(elastic)
        on_resize = None if self._console.columns is None else lambda: self._resize(job)
        # Before the first process starts, so that a signal during the start ends those that already run.
        self._stack.enter_context(stopped_by_signals(job, signals, on_resize))
        try:
            job.start()
            pool, membership = (None, None) if attach is None else attach()
            with self._watched.controlled(job, pool, membership):
                return job.run()
        finally:
            end_orphans()  # before another attempt: they may hold GPUs, ports or files

    def _job(self, placements: Sequence[WorkerPlacement], slots: HostPool | None = None) -> JobSupervisor:
        merged = self._console.is_merged
        return JobSupervisor(
            placements, self._selector, self._observer, self._request.config, merged=merged, slots=slots
        )

    def _elastic_job(
        self, elastic: ElasticOptions
    ) -> tuple[JobSupervisor, Callable[[], tuple[HostPool, CoordinatorServer]]]:
        """The job, and a function that begins to coordinate its members once it has started."""
        pool = self._wait_for_hosts(elastic)
        start_timeout_s = self._request.config.start_timeout_s
        supervisor = self._stack.enter_context(
            ElasticSupervisor(pool.host_specs, is_local_only=pool.is_local_only, start_timeout_s=start_timeout_s)
        )
        # Even without restarts, another worker may start in the slot, at the same port.
        placements = pool.first_placements(
            replace(self._template, restartable=True, coordinator=supervisor.address, identity=supervisor.identity)
        )
        job = self._job(placements, pool)

        def attach() -> tuple[HostPool, CoordinatorServer]:
            membership = supervisor.start(job, elastic, _workers_in(placements), self._observer)
            pool.attach(job, membership)
            return pool, membership

        return job, attach

    def _single_program_job(self, elastic: ElasticOptions) -> JobSupervisor:
        """The job of one program over all workers, with as many workers as there are slots now."""
        placements = self._wait_for_hosts(elastic).first_placements(self._template, is_fixed=True)
        workers = _workers_in(placements)
        if workers < elastic.maximum:
            self._observer.message(f"one program over {workers} workers, of {elastic.maximum} at most")
        return self._job(placements)

    def _wait_for_hosts(self, elastic: ElasticOptions) -> HostPool:
        """The hosts of an elastic job, once enough have answered to begin."""
        pool = HostPool(
            self._request.tasks,
            self._selector,
            self._streams(),
            elastic,
            host_specs=self._request.host_specs,
            start_timeout_s=self._request.config.start_timeout_s,
            observer=self._observer,
            on_host_line=self._console.message,
        )
        self._stack.callback(pool.close)
        pool.wait_for_hosts()
        return pool

    def _streams(self) -> OutputStreams:
        return OutputStreams(
            merged=self._console.is_merged,
            terminal=None if self._console.columns is None else self._terminal_size(),
            # Only pipes and files: the kernel stops a background process group that reads the terminal.
            inherit_input=sys.stdin is not None and not sys.stdin.isatty(),
        )

    def _resize(self, job: JobSupervisor) -> None:
        """Adopt the terminal's new size, and pass it on to the chief's terminal."""
        self._console.columns = shutil.get_terminal_size().columns
        chief = job.placement(0)
        if chief is not None and isinstance(chief.host, LocalHost):
            chief.host.resize(self._terminal_size())

    def _terminal_size(self) -> TerminalSize:
        """Size of the chief's terminal: that of this terminal, less the prefix of each line."""
        size = shutil.get_terminal_size()
        return TerminalSize(size.lines, max(MIN_COLUMNS, size.columns - self._prefix_columns))


def _workers_in(placements: Sequence[WorkerPlacement]) -> int:
    return sum(placement.spec.trains for placement in placements)


def _reporter(request: JobRequest, console: Console, watched: WatchedJob) -> JobReporter:
    waits = not any(task.startswith(SERVERS) for task in request.tasks)  # whether workers wait for each other
    return JobReporter(
        console,
        verbose=request.config.verbose,
        on_stragglers=watched.recorder.stragglers_changed if waits else None,
        timeout_s=math.inf if request.elastic is None else JobConfig.from_environment().timeout_s,
    )


def _raise_file_limit(tasks: int) -> None:
    """Raise the soft limit of open files if this many tasks may need more, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _needed_files(tasks)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _needed_files(tasks: int) -> int:
    return OWN_FILES + FILES_PER_TASK * tasks
