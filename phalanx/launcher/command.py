"""What `phalanx run` does: one job on this terminal, from its start to its exit code."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from phalanx.launcher import exit_codes, page
from phalanx.launcher.environment import evaluator_grace_s, grace_s
from phalanx.launcher.hosts import HostShare
from phalanx.launcher.job import Job, Placement
from phalanx.launcher.lifeline import adopt_orphans, end_orphans
from phalanx.launcher.local import LocalHost, Streams, TerminalSize
from phalanx.launcher.placement import place
from phalanx.launcher.screen import Screen, prefixes, width
from phalanx.launcher.verdict import End

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], object] | signal.Handlers
# The first signal ends the job in order, the second kills it. The third counts where even that cannot be heard
# (a write to a terminal that nobody reads).
IMPATIENCE = 3
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
    verbose: bool = False,
) -> int:
    """Run the program on all workers and return the job's exit code.

    Must be called by the main thread, whose signals it handles meanwhile. Workers that other descendants of
    this process have left behind are ended as well: the process must have no children of its own.

    Args:
        shares: with as many places as there are tasks.
        tasks: see `task_names`.
        arguments: the program's command line, as after `python`.
        restarts: how often each task that was killed is started again.
    """
    grace, evaluator_grace = grace_s(os.environ), evaluator_grace_s(os.environ)
    adopt_orphans()
    terminal = sys.stdout.isatty()
    merged = _same_place(1, 2)
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(page.open_logs(log_dir, tasks))
        screen = Screen(
            tasks,
            sys.stdout,
            sys.stdout if merged else sys.stderr,
            columns=shutil.get_terminal_size().columns if terminal else None,
            colour=terminal and not os.environ.get("NO_COLOR"),
            logs=logs,
        )
        selector = stack.enter_context(selectors.DefaultSelector())
        prefix = width(prefixes(tasks, colour=False)[0])
        placements = place(
            shares,
            arguments,
            selector,
            Streams(
                merged=merged,
                terminal=_terminal_size(prefix) if terminal else None,
                # A background group that reads the terminal is stopped by the kernel: only pipes and files go
                # on.
                inherit_input=sys.stdin is not None and not sys.stdin.isatty(),
            ),
            tasks=tasks,
            backend=backend,
            log_dir=str(log_dir.absolute()) if log_dir else None,
            start_timeout_s=start_timeout_s,
            returns=restarts > 0,
        )
        narrator = _Narrator(screen, placements, verbose=verbose)
        job = Job(placements, selector, narrator, grace_s=grace, evaluator_grace_s=evaluator_grace, restarts=restarts)

        def resize() -> None:
            screen.columns = shutil.get_terminal_size().columns
            for placement in placements:
                if placement.order.rank == 0 and isinstance(placement.host, LocalHost):
                    placement.host.resize(_terminal_size(prefix))

        stack.enter_context(_signals(job, resize if terminal else None))
        try:
            job.start()
            outcome = job.run()
        finally:
            end_orphans(set())
            screen.close()
        verdict = outcome.verdict
        if not verdict.success:
            screen.message(page.render(verdict, outcome.ends, log_dir=str(log_dir) if log_dir else None, full=False))
            if log_dir is not None:
                try:
                    page.write(log_dir, verdict, outcome.ends)
                except OSError as error:
                    screen.message(f"phalanx: this page cannot be written to {log_dir}: {error.strerror}")
    return verdict.code


class _Narrator:
    """Puts what happens in a job on the screen."""

    def __init__(self, screen: Screen, placements: Sequence[Placement], *, verbose: bool):
        self._screen = screen
        self._placements = {placement.order.rank: placement for placement in placements}
        self._verbose = verbose

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        self._screen.feed(rank, is_error, data)

    def started(self, rank: int, pid: int) -> None:
        if self._verbose:
            placement = self._placements[rank]
            self._screen.message(f"phalanx: {placement.task} (rank {rank}) started on {placement.host.name}, pid {pid}")

    def exited(self, end: End) -> None:
        self._screen.finish(end.rank)
        if self._verbose:
            self._screen.message(f"phalanx: {end.task} (rank {end.rank}) ended with exit code {end.code}")

    def returns(self, end: End, count: str) -> None:
        killed = f"was killed by {exit_codes.signal_name(-(end.returncode or 0))}"
        reason = killed if (end.returncode or 0) < 0 else "was left out by the others"
        self._screen.message(f"phalanx: {end.task} {reason}; starting it again ({count})")

    def failed(self, end: End) -> None:
        self._screen.message(f"phalanx: {end.task} (rank {end.rank}) failed with exit code {end.code}; ending the job")

    def overdue(self, tasks: Sequence[str], seconds: float) -> None:
        self._screen.message(
            f"phalanx: {', '.join(tasks)} still runs {seconds:g} s after the training (PHALANX_EVALUATOR_GRACE); "
            f"ending it"
        )


@contextlib.contextmanager
def _signals(job: Job, resize: Callable[[], None] | None) -> Iterator[None]:
    """While inside, the signals that mean the end stop the job; those that are ignored (nohup) stay so."""

    received: list[int] = []

    def on_end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) >= IMPATIENCE:
            os._exit(exit_codes.SIGNAL_BASE + number)  # the lifelines end the workers
        job.stop(number)

    def on_resize(number: int, frame: FrameType | None) -> None:
        if resize is not None:
            resize()

    heeded = [number for number in _ENDING_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    handlers: dict[int, Handler] = dict.fromkeys(heeded, on_end)
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited: the workers' ends would go unnoticed
        handlers[signal.SIGCHLD] = signal.SIG_DFL
    if resize is not None:
        handlers[signal.SIGWINCH] = on_resize
    previous_wakeup = signal.set_wakeup_fd(job.wakeup_fd, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _terminal_size(prefix: int) -> TerminalSize:
    size = shutil.get_terminal_size()
    return TerminalSize(size.lines, max(MIN_COLUMNS, size.columns - prefix))


def _same_place(first: int, second: int) -> bool:
    return os.path.samestat(os.fstat(first), os.fstat(second))
