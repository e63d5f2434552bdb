"""What `phalanx run` does: one job on this terminal, from its start to its exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from phalanx.config.environment import allows_colour
from phalanx.config.job_config import JobConfig
from phalanx.config.launch_config import LaunchConfig
from phalanx.config.parsing import parse_signal
from phalanx.errors import ConfigurationError, PreemptedError, RendezvousError
from phalanx.launcher import failure_report
from phalanx.launcher.elastic_supervisor import ElasticSupervisor
from phalanx.launcher.host_messages import StepTimingReported
from phalanx.launcher.host_pool import HostPool, Members
from phalanx.launcher.host_slots import HostShare
from phalanx.launcher.hosts.base import WorkerPlacement
from phalanx.launcher.hosts.local_host import LocalHost, OutputStreams, TerminalSize
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.job_registry import registered
from phalanx.launcher.job_supervisor import JobOutcome, JobSupervisor
from phalanx.launcher.restart_policy import SHORT_S, RestartPolicy
from phalanx.launcher.root_cause import WorkerExit
from phalanx.launcher.task_table import EVALUATORS
from phalanx.launcher.worker_placement import WorkerRecipe, patience, place
from phalanx.monitoring.console import Console, prefixes, width
from phalanx.runtime import exit_codes
from phalanx.runtime.orphan_guard import adopt_orphans, end_orphans

if TYPE_CHECKING:
    from phalanx.launcher.straggler_watch import StragglerWatch

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PREEMPTED = PreemptedError.exit_code
Handler = Callable[[int, FrameType | None], object] | signal.Handlers
# The first signal ends the job in order, a Ctrl-C after it kills it. The third Ctrl-C counts where even that cannot be
# heard (a write to a terminal that nobody reads).
IMPATIENCE = 3
# Before hosts that did not come are tried again.
GATHER_AGAIN_S = 10.0
# What this process keeps open: for itself, and for each task on this host (pipes, a file of progress, a port, ...).
OWN_FILES = 32
FILES_PER_TASK = 8
# Narrower than this a progress bar is no use, and wrapping lines are the lesser evil.
MIN_COLUMNS = 20


def run(
    shares: Sequence[HostShare],
    arguments: Sequence[str],
    *,
    backend: str | None = None,
    tasks: Sequence[str],
    log_dir: Path | None = None,
    start_timeout_s: float | None = None,
    restarts: int = 0,
    members: Members | None = None,
    max_restarts: int = 0,
    preemption_signal: str | None = None,
    verbose: bool = False,
) -> int:
    """Run the program on all workers and return the job's exit code.

    Must be called by the main thread, whose signals it handles meanwhile. Workers that other descendants of
    this process have left behind are ended as well; children that it has by now are left alone.

    Args:
        shares: with as many places as there are tasks; in a job whose members come and go, with as many as there are.
        tasks: see `task_names`.
        arguments: the program's command line, as after `python`.
        restarts: how often each task that was killed is started again.
        members: of a job whose members come and go; None: the job ends with the first that is lost.
        max_restarts: how often the whole job is started again when it has died.
        preemption_signal: name of a signal that, like SIGTERM, means to save and end.
    """
    launch = LaunchConfig.from_environment()
    ending: tuple[signal.Signals, ...] = _ENDING_SIGNALS
    if preemption_signal is not None and parse_signal(preemption_signal) not in ending:
        ending = (*ending, parse_signal(preemption_signal))
    start_timeout_s = patience(start_timeout_s)
    adopt_orphans()
    _make_room(len(tasks))
    terminal = sys.stdout.isatty()
    merged = _same_place(1, 2)
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(failure_report.open_logs(log_dir, tasks))
        screen = Console(
            tasks,
            sys.stdout,
            sys.stdout if merged else sys.stderr,
            columns=shutil.get_terminal_size().columns if terminal else None,
            colour=terminal and allows_colour(),
            logs=logs,
        )

        def once() -> JobOutcome:
            return _run_once(
                shares,
                arguments,
                screen,
                merged=merged,
                terminal=terminal,
                tasks=tasks,
                backend=backend,
                log_dir=log_dir,
                start_timeout_s=start_timeout_s,
                restarts=restarts,
                members=members,
                preemption_signal=preemption_signal,
                ending=ending,
                config=replace(launch, restarts=restarts),
                verbose=verbose,
            )

        try:
            outcome = _run_repeatedly(once, screen, max_restarts)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ConfigurationError(
                f"The tasks of this host need more open files than the {limit} that this process may have. Raise the "
                f"limit (`ulimit -n`) to about {_files(len(tasks))}, or start fewer tasks here."
            ) from error
        finally:
            screen.close()
        verdict = outcome.verdict
        if verdict.code == _PREEMPTED and verdict.cause is None:
            screen.message(f"phalanx: {verdict.reason}. Start it again, and it goes on there (exit code {_PREEMPTED})")
        elif not verdict.success:
            screen.message(
                failure_report.render(verdict, outcome.ends, log_dir=str(log_dir) if log_dir else None, full=False)
            )
            if log_dir is not None:
                try:
                    failure_report.write(log_dir, verdict, outcome.ends)
                except OSError as error:
                    screen.message(f"phalanx: this page cannot be written to {log_dir}: {error.strerror}")
    return verdict.code


def _run_repeatedly(once: Callable[[], JobOutcome], screen: Console, max_restarts: int) -> JobOutcome:
    """Run the job, and again as a whole when it has died, as long as that may help."""
    lives = RestartPolicy(max_restarts, elastic=True)
    lived = False
    while True:
        began = time.monotonic()
        try:
            outcome = once()
        except RendezvousError as error:
            # What was there when the job began may come back: hosts that have lost their power take minutes.
            if not lived or lives.delay_s(0, None, SHORT_S) is None:
                raise
            screen.message(f"phalanx: {error} Trying to start the job again ({lives.describe(0)})")
            time.sleep(GATHER_AGAIN_S)
            continue
        lived = True
        verdict = outcome.verdict
        died = verdict.cause is not None  # else it has succeeded, or was told to end
        delay_s = lives.delay_s(0, verdict.code, time.monotonic() - began) if died else None
        if delay_s is None:
            if died and max_restarts:
                screen.message(f"phalanx: the job is not started again, after {lives.describe(0)} restarts")
            return outcome
        screen.message(f"phalanx: {verdict.reason}. Starting the whole job again ({lives.describe(0)})")
        time.sleep(delay_s)


def _run_once(
    shares: Sequence[HostShare],
    arguments: Sequence[str],
    screen: Console,
    *,
    merged: bool,
    terminal: bool,
    tasks: Sequence[str],
    backend: str | None,
    log_dir: Path | None,
    start_timeout_s: float | None,
    restarts: int,
    members: Members | None,
    preemption_signal: str | None,
    ending: Sequence[signal.Signals],
    config: LaunchConfig,
    verbose: bool,
) -> JobOutcome:
    """One life of the job; the arguments are those of `run`."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        prefix = width(prefixes(tasks, colour=False)[0])
        streams = OutputStreams(
            merged=merged,
            terminal=_terminal_size(prefix) if terminal else None,
            # A background group that reads the terminal is stopped by the kernel: only pipes and files go
            # on.
            inherit_input=sys.stdin is not None and not sys.stdin.isatty(),
        )
        recipe = WorkerRecipe(
            arguments,
            tasks,
            backend=backend,
            start_timeout_s=start_timeout_s,
            returns=restarts > 0,
            preemption_signal=preemption_signal,
        )

        def say(text: str) -> None:
            screen.message(f"phalanx: {text}")

        pool = keeping = tls = None
        if members is None:
            placements = place(shares, recipe, selector, streams, screen.message)
        else:
            pool = stack.enter_context(
                HostPool(
                    tasks,
                    selector,
                    streams,
                    members,
                    shares=shares,
                    start_timeout_s=start_timeout_s,
                    log=say,
                    relay=screen.message,
                )
            )
            pool.gather()
            keeping = stack.enter_context(
                ElasticSupervisor(pool.shares, stays_here=pool.stays_here, start_timeout_s=start_timeout_s)
            )
            tls = JobConfig.from_environment().tls
            # A place is taken again, by this worker or another one, whether tasks are restarted or not.
            placements = pool.first(replace(recipe, returns=True, keeper=keeping.address, identity=keeping.identity))
        narrator = _Narrator(screen, verbose=verbose)
        job = JobSupervisor(
            placements,
            selector,
            narrator,
            config,
            merged=merged,
            slots=pool,
        )

        def resize() -> None:
            screen.columns = shutil.get_terminal_size().columns
            first = job.placement(0)
            if first is not None and isinstance(first.host, LocalHost):
                first.host.resize(_terminal_size(prefix))

        stack.enter_context(_signals(job, ending, resize if terminal else None))
        try:
            job.start()
            if pool is not None and keeping is not None and members is not None:
                trains = sum(placement.spec.trains for placement in placements)
                secret, job_id = keeping.identity
                stack.enter_context(registered(job_id, keeping.address, secret, arguments, tls))
                pool.begin(job, keeping.begin(job, members, trains, say))
            return job.run()
        finally:
            end_orphans()


class _Narrator(JobObserver):
    """Puts what happens in a job on the screen."""

    def __init__(self, screen: Console, *, verbose: bool):
        self._screen = screen
        self._verbose = verbose
        self._comparison: StragglerWatch | None = None

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        self._screen.feed(rank, is_error, data)

    def started(self, placement: WorkerPlacement, pid: int) -> None:
        if self._verbose:
            task = f"{placement.task} (rank {placement.spec.rank})"
            self._screen.message(f"phalanx: {task} started on {placement.host.name}, pid {pid}")

    def exited(self, end: WorkerExit) -> None:
        self._screen.finish(end.rank)
        if self._comparison is not None:
            self._comparison.forget(end.rank)
        if self._verbose:
            self._screen.message(f"phalanx: {end.task} (rank {end.rank}) ended with exit code {end.code}")

    def step_timing(self, task: str, timing: StepTimingReported) -> None:
        if self._comparison is None:
            from phalanx.launcher.straggler_watch import StragglerWatch  # which the first steps need not wait for

            self._comparison = StragglerWatch()
        for text in self._comparison.add(timing, task, time.monotonic()):
            self._screen.message(f"phalanx: {text}")

    def restarting(self, end: WorkerExit, count: str) -> None:
        self._screen.message(f"phalanx: {end.task} {exit_codes.ending(end.returncode)}; starting it again ({count})")

    def failed(self, end: WorkerExit) -> None:
        if end.was_preempted:
            return  # all leave, each with its own word
        self._screen.message(f"phalanx: {end.task} (rank {end.rank}) failed with exit code {end.code}; ending the job")

    def left_behind(self, end: WorkerExit) -> None:
        self._screen.message(
            f"phalanx: {end.task} (rank {end.rank}) {exit_codes.ending(end.returncode)}; the others go on without it"
        )

    def overdue(self, tasks: Sequence[str], seconds: float) -> None:
        bound = " (PHALANX_EVALUATOR_GRACE)" if any(task.startswith(EVALUATORS) for task in tasks) else ""
        self._screen.message(
            f"phalanx: {', '.join(tasks)} still runs {seconds:g} s after the training{bound}; ending it"
        )


@contextlib.contextmanager
def _signals(job: JobSupervisor, ending: Sequence[signal.Signals], resize: Callable[[], None] | None) -> Iterator[None]:
    """While inside, the signals that mean the end stop the job; those that are ignored (nohup) stay so."""

    received: list[int] = []

    def on_end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if received.count(signal.SIGINT) >= IMPATIENCE:
            os._exit(exit_codes.SIGNAL_BASE + number)  # the lifelines end the workers
        job.stop(number)

    def on_resize(number: int, frame: FrameType | None) -> None:
        if resize is not None:
            resize()

    heeded = [number for number in ending if signal.getsignal(number) != signal.SIG_IGN]
    handlers: dict[int, Handler] = dict.fromkeys(heeded, on_end)
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited: the workers' ends would go unnoticed
        handlers[signal.SIGCHLD] = signal.SIG_DFL
    if resize is not None:
        handlers[signal.SIGWINCH] = on_resize
    previous_wakeup = signal.set_wakeup_fd(job.loop.wakeup_fd, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _make_room(tasks: int) -> None:
    """Raise the soft limit of open files, as far as the hard one allows, where so many tasks may need more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _files(tasks)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )


def _files(tasks: int) -> int:
    """How many open files so many tasks need."""
    return OWN_FILES + FILES_PER_TASK * tasks


def _terminal_size(prefix: int) -> TerminalSize:
    size = shutil.get_terminal_size()
    return TerminalSize(size.lines, max(MIN_COLUMNS, size.columns - prefix))


def _same_place(first: int, second: int) -> bool:
    return os.path.samestat(os.fstat(first), os.fstat(second))
