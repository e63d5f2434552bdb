"""Shows the events of a job of `phalanx run` on the console."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from phalanx.config.task_names import count_workers
from phalanx.launcher.failures.root_cause import WorkerExit
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.start_phases import StartPhases
from phalanx.launcher.task_table import TRAINING
from phalanx.monitoring.console import Console
from phalanx.monitoring.stragglers import StragglerDetector
from phalanx.monitoring.worker_figures import TaskReport


class JobReporter(JobObserver):
    """Shows the output of all tasks, and a line for each event that the user should know.

    Args:
        verbose: Whether to show each start and exit.
        on_stragglers: Receives the tasks that the others wait for, whenever they change; None if workers do not wait
            for each other.
        timeout_s: See `StragglerDetector`.
    """

    def __init__(
        self,
        console: Console,
        *,
        verbose: bool,
        on_stragglers: Callable[[Sequence[str]], None] | None = None,
        timeout_s: float = math.inf,
    ):
        self._console = console
        self._verbose = verbose
        self._on_stragglers = on_stragglers
        self._stragglers = StragglerDetector(timeout_s=timeout_s)
        self._members: Sequence[str] | None = None
        self._slow: Sequence[str] = []
        self._phases = StartPhases()
        self._is_ending = False  # if so, the progress of its tasks is no longer shown

    def report(self, text: str) -> None:
        """Show a line from the launcher."""
        self._console.message(f"phalanx: {text}")

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        self._console.feed(rank, is_error, data)

    def task_started(self, placement: WorkerPlacement, pid: int) -> None:
        if self._verbose:
            self.report(f"{placement.task} (rank {placement.spec.rank}) started on {placement.host.name}, pid {pid}")

    def task_exited(self, exit_: WorkerExit) -> None:
        self._console.finish(exit_.rank)
        error = exit_.diagnostics.error
        # Not printed by the worker.
        if error is not None and not error.interrupted and not exit_.was_preempted:
            self._console.log(exit_.rank, error.traceback)
        self._stragglers.forget(exit_.task)
        if self._verbose:
            self.report(f"{exit_.task} (rank {exit_.rank}) ended with exit code {exit_.code}")

    def task_reported(self, task: str, rank: int, report: TaskReport) -> None:
        if self._is_ending:
            return
        if (text := self._phases.add(report.phase, report.epoch, report.step)) is not None:
            self.report(text)
        if self._on_stragglers is None or not task.startswith(TRAINING):
            return
        for text in self._stragglers.add(task, f"{task} (rank {rank})", report, time.monotonic()):
            self.report(text)
        if (slow := self._stragglers.slow) != self._slow:
            self._slow = slow
            self._on_stragglers(slow)

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None:
        if self._members is not None:
            joined = ", ".join(task for task in tasks if task not in self._members)
            text = f"generation {generation}: {count_workers(len(tasks))}"
            self.report(f"{text}; {joined} joined" if joined else text)
        self._members = tasks
        self._stragglers.use_members(tasks)

    def message(self, text: str) -> None:
        self.report(text)

    def job_failed(self, exit_: WorkerExit) -> None:
        self._is_ending = True
        if self._verbose and not exit_.was_preempted:  # otherwise all exit, and each reports it itself
            self.report(f"{exit_.failure}; ending the job")

    def shutdown_started(self) -> None:
        self._is_ending = True

    def exit_survived(self, exit_: WorkerExit, how: str) -> None:
        if exit_.was_preempted:  # all others exit too
            return
        self.report(f"{exit_.task} {exit_.description}; {how}")
        error = exit_.diagnostics.error
        if error is not None and (self._verbose or not exit_.distance_from_cause):
            self._console.message(error.traceback if self._verbose else error.folded)
