"""Event loop of a job: start the tasks, restart or replace lost ones, and end all when one fails.

The decisions are in modules without processes: `shutdown` (how a job is ended), `task_table` (what a task's exit means
for the others), `restart_policy` (which tasks are restarted), `root_cause` (which task was the cause). This module
applies them to the events of the hosts and the clock.
"""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.config.launch_config import LaunchConfig
from phalanx.launcher.exit_handler import ExitHandler
from phalanx.launcher.failures.output_tail import OutputTails
from phalanx.launcher.failures.root_cause import RootCause, WorkerExit, find_root_cause
from phalanx.launcher.host_event_loop import HostEventLoop
from phalanx.launcher.host_messages import CheckpointBeforeExit, Event, Exited, Output, Started, WorkerReport
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.restart_policy import RestartPolicy
from phalanx.launcher.shutdown import ABANDON_S, ShutdownPlan, ShutdownStep
from phalanx.launcher.task_table import TaskState, TaskTable, find_abort_causes

if TYPE_CHECKING:
    from phalanx.launcher.elastic_hosts.host_pool import HostPool

# A worker that has been released from an elastic job exits on its own, within seconds.
RELEASE_S = 60.0


@dataclass
class JobOutcome:
    """The outcome of a job that has ended.

    Attributes:
        root_cause: Root cause of the end.
        exits: Exits of all tasks, by rank.
        results: Pickled results of tasks that ran a function, by rank.
    """

    root_cause: RootCause
    exits: list[WorkerExit]
    results: dict[int, bytes] = field(default_factory=dict)


class JobSupervisor:
    """Runs the tasks of one job to their end. Call `start`, then `run`, each once.

    All methods except `stop` and `loop.run_soon` must be called in the thread that runs the job.

    Args:
        config: Grace periods, and the number of restarts allowed for each task.
        merged: Whether stdout and stderr of tasks on this host are one stream.
        slots: Hosts of the workers of an elastic job; None for a job of fixed size.

    Attributes:
        loop: Holds the hosts and runs callbacks from other threads.
    """

    def __init__(
        self,
        placements: Sequence[WorkerPlacement],
        selector: selectors.BaseSelector,
        observer: JobObserver,
        config: LaunchConfig,
        *,
        merged: bool = False,
        slots: HostPool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tasks = TaskTable(placements, elastic=slots is not None, restarts=config.restarts > 0)
        self._plan = ShutdownPlan(config.grace_s, config.preemption_grace_s)
        self._tails = OutputTails(merged=merged)
        self._observer = observer
        self._slots = slots
        self._slots_due = math.inf  # when the next `update` of `_slots` is due
        self._clock = clock
        self._num_exits_before_abort: int | None = None  # not None: the elastic job cannot continue
        self._failure: RootCause | None = None  # of an elastic job, as its coordinator reports
        self._exits = ExitHandler(
            self._tasks,
            self._plan,
            RestartPolicy(config.restarts, elastic=slots is not None),
            self._tails,
            observer,
            slots,
            evaluator_grace_s=config.evaluator_grace_s,
            clock=clock,
        )
        self.loop = HostEventLoop(selector, list(dict.fromkeys(placement.host for placement in placements)))

    # ---- external control

    def stop(self, number: int) -> None:
        """End the job because this process received signal `number`; immediately if it is SIGINT after another signal.

        Only records the signal and wakes the loop, so signal handlers and other threads may call it at any time.
        """
        self._plan.request_stop(number)
        self.loop.wake()

    @property
    def is_shutting_down(self) -> bool:
        """Whether the launcher is ending the job, for whatever reason."""
        return self._plan.is_shutting_down

    @property
    def accepts_workers(self) -> bool:
        """Whether a worker started now could still take part."""
        return not self.is_shutting_down and not self._tasks.training_is_over and self._num_exits_before_abort is None

    def placement(self, rank: int) -> WorkerPlacement | None:
        """The current or last placement of a task; None if it has never been started."""
        record = self._tasks.get(rank)
        return None if record is None else record.placement

    def start_worker(self, placement: WorkerPlacement) -> None:
        """Start a worker of an elastic job in a free slot."""
        self._tasks.place(placement)
        self.loop.add(placement.host)
        self._handle_all(placement.host.start([placement.spec]))

    def kill(self, task: str) -> None:
        """Kill a task; its exit is then handled like that of any killed task."""
        for record in self._tasks.named(task):
            if record.exit is None:
                record.placement.signal(signal.SIGKILL)

    def request_checkpoint(self) -> None:
        """Ask every worker for a checkpoint; the chief writes it."""
        for record in self._tasks:
            if record.trains and record.state is TaskState.RUNNING:
                record.placement.host.request_checkpoint(record.rank)

    def release(self, task: str) -> None:
        """Release a worker from an elastic job: its exit is neither a failure nor the end of the job."""
        for record in self._tasks.named(task):
            record.is_released = True
            record.kill_at = self._clock() + RELEASE_S

    def resize(self, workers: int) -> None:
        """Set the desired number of workers of an elastic job."""
        if self._slots is not None:
            self._slots.set_target(workers)

    def abort(self, reason: str, code: int) -> None:
        """End the remaining workers of an elastic job that cannot continue.

        Args:
            reason, code: Reason and exit code, used if no worker failed on its own.
        """
        if self._num_exits_before_abort is None:
            self._num_exits_before_abort = len(self._tasks.exits)
            self._failure = RootCause(code, None, reason)
        self._plan.fail(self._clock())

    def training_changed(self, *, is_training: bool) -> None:
        """Record whether members of an elastic job are training."""
        self._tasks.is_training = is_training

    def finish(self, tasks: Sequence[str]) -> None:
        """Record the workers that finished an elastic job, and end those that were still about to join."""
        self._tasks.is_complete = True
        for record in self._tasks:
            if not record.trains or record.name in tasks:  # members exit on their own
                continue
            if record.state is TaskState.RUNNING:
                record.is_unneeded = True
                record.abandon_at = self._clock() + ABANDON_S
                record.placement.signal(signal.SIGKILL)
            elif record.state is TaskState.RESTARTING:
                self._exits.abandon_restart(record, was_ended_by_launcher=True)

    # ---- the loop

    def start(self) -> None:
        """Start the tasks. If that fails, kill those already started."""
        try:
            for host in self.loop.hosts:
                specs = [record.placement.spec for record in self._tasks if record.placement.host is host]
                self._handle_all(host.start(specs))
        except BaseException:
            self.loop.close()
            raise

    def run(self) -> JobOutcome:
        """Run until all tasks have exited. On any exception, kill all tasks."""
        try:
            while self._tasks.open or (self._tasks.is_deserted and self.accepts_workers):
                self.loop.wait(self._timeout_s())
                self._handle_all(self.loop.events())
                self._advance()
        finally:
            self.loop.close()
        exits, before = self._tasks.exits, self._num_exits_before_abort
        causes = exits if before is None else find_abort_causes(self._tasks, before)
        root_cause = find_root_cause(causes, interrupted_by=self._plan.interrupted_by)
        if root_cause.success and self._failure is not None:
            root_cause = self._failure
        return JobOutcome(root_cause, exits, {record.rank: record.result for record in self._tasks if record.result})

    def _timeout_s(self) -> float:
        dues = [self._slots_due, self._plan.next_due, *(record.next_due for record in self._tasks)]
        return max(0.0, min(due for due in dues if due is not None) - self._clock())

    def _advance(self) -> None:
        """Perform all actions that are due."""
        now = self._clock()
        if (number := self._plan.handle_signals(now)) is not None:
            self._observer.shutdown_started()
            if number == signal.SIGINT:
                self._observer.message("interrupted; ending the job (Ctrl-C again kills it at once)")
        if self._plan.check_overdue(now):
            late = [record for record in self._tasks if record.exit is None]
            bound = " (PHALANX_EVALUATOR_GRACE)" if any(record.is_evaluator for record in late) else ""
            names, seconds = ", ".join(record.name for record in late), self._exits.optional_grace_s
            self._observer.message(f"{names} still runs {seconds:g} s after the training{bound}; ending it")
        for record in self._tasks:
            if record.kill_at is not None and record.kill_at <= now:
                record.kill_at = None
                record.placement.signal(signal.SIGKILL)
            if record.abandon_at is not None and record.abandon_at <= now:
                self._exits.abandon(record)
        while step := self._plan.pop_due_step(self._clock()):
            self._shut_down(step)
        for record in self._tasks:
            if record.state is TaskState.RESTARTING and (event := self._exits.restart_if_due(record)):
                self._handle(event)
        if self._slots is not None:
            wait_s = self._slots.update()
            self._slots_due = math.inf if wait_s is None else self._clock() + wait_s

    def _shut_down(self, step: ShutdownStep) -> None:
        numbers = {
            ShutdownStep.INTERRUPT: signal.SIGINT,
            ShutdownStep.TERMINATE: signal.SIGTERM,
            ShutdownStep.KILL: signal.SIGKILL,
        }
        for record in self._tasks.open:
            if step is ShutdownStep.DUMP_STACKS:
                # After a failure, this step ends the grace period. After a signal it is immediate and means nothing.
                record.is_hung = record.is_hung or self._plan.interrupted_by is None
                record.placement.host.dump_stacks(record.rank)
            elif step is ShutdownStep.ABANDON:
                self._exits.abandon(record)
            else:
                record.placement.signal(numbers[step])
        if step is ShutdownStep.TERMINATE:
            self._handle_all(self.loop.events())  # local workers that save a checkpoint first have already answered

    # ---- reports of the hosts

    def _handle_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Output(rank, is_error, data):
                self._tails.append(rank, is_error, data)
                self._observer.output(rank, is_error, data)
            case Started(rank, pid):
                record = self._tasks[rank]
                record.pid, record.started_at = pid, self._clock()
                self._tails.clear(rank)  # drop the output of its previous process
                self._observer.task_started(record.placement, pid)
            case WorkerReport(rank, report):
                self._observer.task_reported(self._tasks[rank].name, rank, report)
            case CheckpointBeforeExit():
                self._plan.allow_checkpoint(self._clock())
            case Exited():
                self._exits.handle(event)
