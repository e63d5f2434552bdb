"""The tasks of a running job: the state of each, and what it implies for the others.

This module uses no processes and no clock. `JobSupervisor` records the reports of its hosts here, and queries them.

    RUNNING ── exits, restartable ───────────────> RESTARTING ── its time comes ──> RUNNING
       ├────── exits, its slot is gone (elastic) ─> VACANT ───── a slot is found ──> RUNNING
       └────── exits for good ────────────────────> EXITED

A task has *left* once it is no longer RUNNING, and is *open* until it is EXITED or VACANT.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.config.task_names import CHIEF_RANK
from phalanx.errors import EvictedError, PeerLostError, PreemptedError, RendezvousError
from phalanx.launcher.failures.root_cause import WorkerExit
from phalanx.launcher.host_messages import WorkerDiagnostics
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.runtime.exit_codes import CONSEQUENCE_CERTAINTY

EVALUATORS = "evaluator/"
SERVERS = "ps/"
TRAINING = ("chief/", "worker/")
# A task that was restarted this shortly before the chief or the servers exited may never have connected to them.
RECENT_RESTART_S = 10.0


class TaskState(enum.Enum):
    """See the module docstring."""

    RUNNING = "running"
    RESTARTING = "restarting"
    VACANT = "vacant"
    EXITED = "exited"


@dataclass
class TaskRecord:
    """The state of one task. Times are in seconds of the job's clock.

    Attributes:
        placement: Its current or last placement.
        pid, started_at: Id and start time of its current or last process.
        restart_at: Time at which a RESTARTING task is due.
        kill_at: Time at which it is killed if it has been released from an elastic job and does not exit.
        abandon_at: Time at which a killed task counts as exited although its process still exists.
        previous: The exit before its last restart.
        exit: Its final exit.
        is_released: Whether its exit is neither a failure nor the end of the job.
        is_unneeded: Whether the others have finished the job without it.
        is_hung: Whether it was still running at the end of the grace period after a failure.
        result: Pickled result of a task that ran a function.
    """

    placement: WorkerPlacement
    state: TaskState = TaskState.RUNNING
    pid: int = 0
    started_at: float | None = None
    restart_at: float = 0.0
    kill_at: float | None = None
    abandon_at: float | None = None
    previous: WorkerExit | None = None
    exit: WorkerExit | None = None
    is_released: bool = False
    is_unneeded: bool = False
    is_hung: bool = False
    result: bytes = b""

    @property
    def rank(self) -> int:
        return self.placement.spec.rank

    @property
    def name(self) -> str:
        return self.placement.task

    @property
    def trains(self) -> bool:
        return self.placement.spec.trains

    @property
    def is_server(self) -> bool:
        return self.name.startswith(SERVERS)

    @property
    def is_evaluator(self) -> bool:
        return self.name.startswith(EVALUATORS)

    @property
    def is_open(self) -> bool:
        """Whether the job waits for this task."""
        return self.state in (TaskState.RUNNING, TaskState.RESTARTING)

    @property
    def has_succeeded(self) -> bool:
        return self.exit is not None and not self.exit.has_failed

    @property
    def next_due(self) -> float | None:
        """Time of its next scheduled action; None if nothing is scheduled."""
        dues = [self.kill_at, self.abandon_at, self.restart_at if self.state is TaskState.RESTARTING else None]
        return min((due for due in dues if due is not None), default=None)

    def uptime_s(self, now: float) -> float:
        """Seconds since its process was started."""
        return 0.0 if self.started_at is None else now - self.started_at

    def restarted_recently(self, now: float) -> bool:
        return self.previous is not None and self.uptime_s(now) < RECENT_RESTART_S


class TaskTable:
    """All tasks of a job, by rank.

    Args:
        elastic: Whether the job continues without lost workers.
        restarts: Whether tasks may be restarted at all.

    Attributes:
        is_complete: Whether members of an elastic job have finished it, so that no other worker needs to join.
        is_training: Whether members of an elastic job are inside an entry such as `fit`.
    """

    def __init__(self, placements: Sequence[WorkerPlacement], *, elastic: bool, restarts: bool):
        self._elastic = elastic
        self._restarts = restarts
        self._tasks = {placement.spec.rank: TaskRecord(placement) for placement in placements}
        self.is_complete = self.is_training = False

    def __getitem__(self, rank: int) -> TaskRecord:
        return self._tasks[rank]

    def get(self, rank: int) -> TaskRecord | None:
        return self._tasks.get(rank)

    def __iter__(self) -> Iterator[TaskRecord]:
        return iter(list(self._tasks.values()))

    def named(self, task: str) -> list[TaskRecord]:
        return [record for record in self if record.name == task]

    def place(self, placement: WorkerPlacement) -> TaskRecord:
        """Create the record of an elastic worker that is about to start, perhaps in a different slot than before."""
        rank = placement.spec.rank
        previous = self._tasks.get(rank)  # the new record keeps the task's history
        self._tasks[rank] = TaskRecord(placement, previous=None if previous is None else previous.previous)
        return self._tasks[rank]

    @property
    def exits(self) -> list[WorkerExit]:
        """The final exits, by rank."""
        return [record.exit for _, record in sorted(self._tasks.items()) if record.exit is not None]

    @property
    def open(self) -> list[TaskRecord]:
        return [record for record in self if record.is_open]

    @property
    def is_deserted(self) -> bool:
        """Whether an elastic job has no worker left, though others may still join."""
        workers = [record for record in self if record.trains]
        return self._elastic and bool(workers) and all(record.state is TaskState.VACANT for record in workers)

    @property
    def has_servers(self) -> bool:
        return any(record.is_server for record in self)

    @property
    def chief_has_exited(self) -> bool:
        return (chief := self.get(CHIEF_RANK)) is not None and chief.exit is not None

    @property
    def servers_have_finished(self) -> bool:
        """Whether a server has exited successfully, as servers do when the job is over."""
        return any(record.is_server and record.has_succeeded for record in self)

    @property
    def training_is_over(self) -> bool:
        """Whether the training has ended, successfully or not: with the chief or, in an elastic job, with any member.

        A member whose program exits between two entries does not end the training: the others begin the next entry.
        """
        if self._elastic:
            has_success = any(record.trains and record.has_succeeded for record in self)
            return self.is_complete or (has_success and not self.is_training)
        return self.chief_has_exited or self.servers_have_finished

    def has_only_optional_tasks(self, now: float) -> bool:
        """Whether no task waits for those that still run: evaluators; servers whose workers have all exited; and, once
        chief and servers have exited, workers that they excluded."""
        left = self.open
        servers = [record for record in left if record.is_server]
        if self.has_servers:
            restarting = any(record.state is TaskState.RESTARTING for record in left)
            if not restarting and not any(record.trains for record in left):
                return True
            # A task that was restarted after the job's end is never notified of it.
            if self.chief_has_exited and all(record.restarted_recently(now) for record in servers):
                return True
            chief = self.get(CHIEF_RANK)
            if chief is not None and chief.exit is None and self.servers_have_finished and not servers:
                return chief.restarted_recently(now) or all(record.is_evaluator for record in left)
        return all(record.is_evaluator for record in left)

    def may_restart(self, record: TaskRecord, *, others_continue: bool) -> bool:
        """Whether an exited task still has work to do, in a job that is not shutting down."""
        if not record.placement.spec.restartable or self.training_is_over:
            return False
        # A member of an elastic job needs another member that has the training's state.
        return not self._elastic or not record.trains or others_continue

    def was_excluded(self, record: TaskRecord) -> bool:
        """Whether this worker exits after the chief and all servers have finished. They do not wait for a worker that
        they excluded, which therefore cannot know that they are done."""
        servers = [other for other in self if other.is_server]
        chief = self.get(CHIEF_RANK)
        return (
            bool(servers)
            and record.trains
            and chief is not None
            and all(other.has_succeeded for other in [chief, *servers])
        )

    def is_caused_by_job(self, record: TaskRecord, returncode: int | None) -> bool:
        """Whether a task exits because the job is over, regardless of its exit code."""
        return (
            record.is_unneeded
            or (returncode == EvictedError.exit_code and self.chief_has_exited)
            or (returncode == PeerLostError.exit_code and self.was_excluded(record))
        )

    def can_continue_without(
        self,
        record: TaskRecord,
        returncode: int | None,
        diagnostics: WorkerDiagnostics,
        *,
        is_shutting_down: bool,
        has_left_early: bool = False,
    ) -> bool:
        """Whether the other tasks continue without a task that has just exited."""
        if not record.trains:
            return False
        # Only running ones: if all others have finished, none can take over this task's remaining work.
        others = [other for other in self if other.trains and other is not record]
        has_failed = returncode != 0 or has_left_early
        if self._elastic and has_failed and any(other.state is TaskState.RUNNING for other in others):
            return True
        return not is_shutting_down and self._has_lost_contact(record, returncode, diagnostics)

    def _has_lost_contact(self, record: TaskRecord, returncode: int | None, diagnostics: WorkerDiagnostics) -> bool:
        """Whether only this worker, in a job with servers, lost its host or its connection to the servers or the chief.
        If a server is gone for good, the chief misses it too and the job ends."""
        if record.rank == CHIEF_RANK or not self.has_servers or not self._restarts:
            return False
        if returncode is None or self._misses_a_task(record, diagnostics):
            return True
        error, previous = diagnostics.error, record.previous
        is_late = error is not None and error.code == RendezvousError.exit_code
        return is_late and previous is not None and previous.others_continue

    def _misses_a_task(self, record: TaskRecord, diagnostics: WorkerDiagnostics) -> bool:
        """Whether a worker exited because it lost a server or the chief and, as far as is known, the others did not."""
        if (diagnostics.missed or "").startswith(SERVERS):
            return True
        others = [other for other in self.open if other.trains and other.rank not in (CHIEF_RANK, record.rank)]
        chief = self.get(CHIEF_RANK)
        return (
            chief is not None
            and diagnostics.missed == chief.name
            and any(other.state is not TaskState.RESTARTING for other in others)
        )


def find_abort_causes(table: TaskTable, num_exits_before: int) -> list[WorkerExit]:
    """Find the exits that explain why an elastic job was aborted.

    If a worker found no member left, the members that it lost are the cause, even if they were being restarted. Their
    exits after the restart are a consequence, unless they ran again and raised an unrelated error.

    Args:
        num_exits_before: Number of tasks that had exited for good when the job was aborted.
    """
    causes = []
    for exit_ in table.exits:
        previous = table[exit_.rank].previous
        causes.append(previous if previous is not None and _is_echo(exit_, num_exits_before) else exit_)
    # Workers without a slot have no final exit, but their last exit may have been the cause.
    vacant = [record.previous for record in table if record.state is TaskState.VACANT]
    causes += [previous for previous in vacant if previous is not None]
    return [replace(cause, others_continue=False) for cause in causes]


def _is_echo(exit_: WorkerExit, num_exits_before: int) -> bool:
    """Whether a task exited because the job ended."""
    error = exit_.diagnostics.error
    not_own = (*CONSEQUENCE_CERTAINTY, RendezvousError.exit_code, EvictedError.exit_code, PreemptedError.exit_code)
    own = error is not None and not error.interrupted and error.code not in not_own
    return (exit_.was_ended_by_launcher or exit_.exit_index >= num_exits_before) and not own
