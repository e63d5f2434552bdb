"""Handles the exit of a task's process: restarts the task, queues it for another slot, or records its final exit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_fields

from phalanx.config.task_names import CHIEF_RANK
from phalanx.launcher.failures.output_tail import OutputTails
from phalanx.launcher.failures.root_cause import WorkerExit
from phalanx.launcher.host_messages import Event, Exited, WorkerDiagnostics
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.restart_policy import RestartPolicy
from phalanx.launcher.shutdown import ShutdownPlan
from phalanx.launcher.task_table import TaskRecord, TaskState, TaskTable

if TYPE_CHECKING:
    from phalanx.launcher.elastic_hosts.host_pool import HostPool

# Once the chief and all servers have finished, a worker that they excluded has no work left.
EXCLUDED_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class ExitHandler:
    """Records exits in the job's table and plan, which `JobSupervisor` owns. For other fields, see its arguments.

    Attributes:
        evaluator_grace_s: Seconds that an evaluator may run after the training.
    """

    tasks: TaskTable
    plan: ShutdownPlan
    policy: RestartPolicy
    tails: OutputTails
    observer: JobObserver
    slots: HostPool | None
    evaluator_grace_s: float
    clock: Callable[[], float]

    def handle(self, event: Exited) -> None:
        """Handle the exit of a task's process."""
        record, code = self.tasks[event.rank], event.returncode
        record.kill_at = record.abandon_at = None
        record.result = event.result or record.result
        exit_ = self._describe(record, event)
        self.observer.task_exited(exit_)
        if exit_.has_failed and self.slots is not None:
            self.slots.task_failed(exit_.task)
        may_restart = not self.plan.is_shutting_down and self.tasks.may_restart(
            record, others_continue=exit_.others_continue
        )
        slots = self.slots if record.trains else None  # an evaluator keeps its slot
        released = record.is_released and not self.plan.is_shutting_down
        if slots is not None and (released or (code is None and may_restart)):
            slots.keep_or_free_slot(record.rank, failed=not released)
            record.state = TaskState.VACANT
            return
        delay_s: float | None = None
        if may_restart:
            delay_s = self.policy.delay_s(
                record.rank, code, record.uptime_s(self.clock()), others_continue=exit_.others_continue
            )
        if delay_s is None:
            self._finish(record, exit_)
            return
        record.previous = exit_  # for `find_abort_causes`, in case the restarted process only echoes the job's end
        if slots is not None and not slots.keep_or_free_slot(record.rank, failed=True):
            record.state = TaskState.VACANT
            return
        record.state, record.restart_at = TaskState.RESTARTING, self.clock() + delay_s
        self.observer.exit_survived(exit_, f"starting it again ({self.policy.describe(record.rank)})")

    def abandon(self, record: TaskRecord) -> None:
        """Count a killed task as exited, although its process still exists."""
        self.handle(Exited(record.rank, -signal.SIGKILL, WorkerDiagnostics()))

    def restart_if_due(self, record: TaskRecord) -> Event | None:
        """Restart a task if it is due. If a restart has become pointless, make its last exit the final one."""
        if self.plan.is_shutting_down:
            self.abandon_restart(record)
        elif self.tasks.training_is_over:
            # Only the chief may have left work unfinished.
            self._finish(record, self.abandon_restart(record, was_ended_by_launcher=record.rank != CHIEF_RANK))
        elif record.restart_at <= self.clock():
            record.state = TaskState.RUNNING
            return record.placement.host.restart(record.rank)
        return None

    def abandon_restart(self, record: TaskRecord, *, was_ended_by_launcher: bool = False) -> WorkerExit:
        """Cancel the restart of a task that waits for it."""
        last = record.previous
        assert last is not None
        record.exit = replace(
            last,
            exit_index=len(self.tasks.exits),
            was_ended_by_launcher=last.was_ended_by_launcher or was_ended_by_launcher,
        )
        record.state = TaskState.EXITED
        return record.exit

    @property
    def optional_grace_s(self) -> float:
        """Seconds for tasks that no other task waits for: evaluators have work to do, excluded workers have none."""
        evaluates = any(record.is_evaluator for record in self.tasks.open)
        return self.evaluator_grace_s if evaluates else min(self.evaluator_grace_s, EXCLUDED_GRACE_S)

    def _describe(self, record: TaskRecord, event: Exited) -> WorkerExit:
        code, diagnostics = event.returncode, event.diagnostics
        if code and diagnostics.error is None:
            diagnostics = replace_fields(diagnostics, output=self.tails.last_lines(record.rank))
        shutting_down = self.plan.is_shutting_down
        has_left_early = code == 0 and not shutting_down and self._has_left_early(record)
        return WorkerExit(
            rank=record.rank,
            task=record.name,
            host=record.placement.host.name,
            pid=record.pid,
            returncode=code,
            exit_index=len(self.tasks.exits),
            was_ended_by_launcher=self.plan.has_signaled or self.tasks.is_caused_by_job(record, code),
            others_continue=self.tasks.can_continue_without(
                record, code, diagnostics, is_shutting_down=shutting_down, has_left_early=has_left_early
            ),
            has_left_early=has_left_early,
            is_hung=record.is_hung,
            trains=record.trains,
            diagnostics=diagnostics,
        )

    def _has_left_early(self, record: TaskRecord) -> bool:
        """Whether an exit with code 0 is not the end of the job: other members of the elastic job still train."""
        may_leave = record.is_released or self.tasks.is_complete or not record.trains
        return self.slots is not None and not may_leave and self.slots.has_left_early(record.name)

    def _finish(self, record: TaskRecord, exit_: WorkerExit) -> None:
        """Record the final exit of a task."""
        record.exit, record.state = exit_, TaskState.EXITED
        if self.slots is not None:
            self.slots.retire(exit_.rank)
        if exit_.has_failed and not exit_.was_ended_by_launcher:
            if not exit_.others_continue:
                if self.plan.fail(self.clock()):
                    self.observer.job_failed(exit_)
            elif not self.plan.has_begun:
                self.observer.exit_survived(exit_, "the others continue without it")
        if self.tasks.has_only_optional_tasks(self.clock()):
            self.plan.set_optional_deadline(self.clock(), self.optional_grace_s)
