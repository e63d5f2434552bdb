"""How the launcher ends a job: which state it is in, and which steps are due when.

Pure decisions: events and times come in, states and steps come out; `JobSupervisor` carries the steps out. No wait is
unbounded: every schedule ends with SIGKILL, and then with giving up on a process that even SIGKILL does not end.

    RUNNING ── FAILED ──> FAILING ── SIGNALLED ──> TERMINATING
       │                                              ^  ^
       ├─ INTERRUPTED ──> INTERRUPTING ── SIGNALLED ──┘  │ OVERDUE, or KILLED in any state
       ├─ PREEMPTED ────> PREEMPTING ─── SIGNALLED ──> PREEMPTED ── CHECKPOINTING ──> CHECKPOINTING
       └─ ONLY_OPTIONAL_LEFT ──> FINISHING, which takes the same events as RUNNING

An event that the present state has no transition for changes nothing. So the first reason to end a job stays the
reason: a failure during a preemption does not shorten the time for the checkpoint, and Ctrl-C after a failure does not
turn the job into an interrupted one.
"""

from __future__ import annotations

import enum
import signal
from collections import deque
from collections.abc import Mapping

from phalanx.config.environment_variables import DEFAULT_GRACE_S

# A signal handler in C writes the stacks quickly, but workers take turns on a host with fewer cores than workers.
STACKS_S = 0.5
# Between SIGTERM and SIGKILL: time to flush a file, not to write a checkpoint.
TERMINATION_S = 2.0
# After Ctrl-C or SIGTERM the program may have something to finish.
INTERRUPT_GRACE_S = 5.0
# A killed process can hang in the kernel (a dead network file system), where nothing can end it.
GIVE_UP_S = 5.0


class ShutdownStep(enum.Enum):
    """An action that is taken on every task that still runs."""

    DUMP_STACKS = "dump stacks"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    KILL = "kill"
    GIVE_UP = "give up"


class JobState(enum.Enum):
    """Where a job is between its start and its end."""

    RUNNING = "running"
    FINISHING = "finishing"
    """Only tasks that no other task waits for still run, such as an evaluator."""
    FAILING = "failing"
    """A worker failed. The others have some time to exit by themselves, so that their own errors are seen."""
    INTERRUPTING = "interrupting"
    """Ctrl-C was received; no worker has been signalled yet."""
    PREEMPTING = "preempting"
    """SIGTERM or another such signal was received; no worker has been signalled yet."""
    PREEMPTED = "preempted"
    """Workers have received SIGTERM, and may answer that they save a checkpoint first."""
    CHECKPOINTING = "checkpointing"
    """At least one worker saves a checkpoint before it exits."""
    TERMINATING = "terminating"
    """Workers have received a signal: exits are no longer their own."""


class Trigger(enum.Enum):
    """What changes a job's state."""

    ONLY_OPTIONAL_LEFT = "only optional tasks are left"
    FAILED = "a worker failed"
    INTERRUPTED = "SIGINT received"
    PREEMPTED = "another signal received"
    KILLED = "SIGINT received again"
    OVERDUE = "optional tasks run for too long"
    SIGNALLED = "workers were signalled"
    CHECKPOINTING = "a worker saves a checkpoint"


_FROM_RUNNING = {
    Trigger.FAILED: JobState.FAILING,
    Trigger.INTERRUPTED: JobState.INTERRUPTING,
    Trigger.PREEMPTED: JobState.PREEMPTING,
}
TRANSITIONS: Mapping[JobState, Mapping[Trigger, JobState]] = {
    JobState.RUNNING: {**_FROM_RUNNING, Trigger.ONLY_OPTIONAL_LEFT: JobState.FINISHING},
    JobState.FINISHING: {**_FROM_RUNNING, Trigger.OVERDUE: JobState.TERMINATING},
    JobState.FAILING: {Trigger.SIGNALLED: JobState.TERMINATING, Trigger.KILLED: JobState.TERMINATING},
    JobState.INTERRUPTING: {
        Trigger.SIGNALLED: JobState.TERMINATING,
        Trigger.KILLED: JobState.TERMINATING,
    },
    JobState.PREEMPTING: {Trigger.SIGNALLED: JobState.PREEMPTED, Trigger.KILLED: JobState.TERMINATING},
    JobState.PREEMPTED: {
        Trigger.CHECKPOINTING: JobState.CHECKPOINTING,
        Trigger.KILLED: JobState.TERMINATING,
    },
    # Every worker that saves a checkpoint gets the full time: they do not begin at the same moment.
    JobState.CHECKPOINTING: {
        Trigger.CHECKPOINTING: JobState.CHECKPOINTING,
        Trigger.KILLED: JobState.TERMINATING,
    },
    JobState.TERMINATING: {Trigger.KILLED: JobState.TERMINATING},
}
_SIGNALLED = (JobState.PREEMPTED, JobState.CHECKPOINTING, JobState.TERMINATING)

Schedule = tuple[tuple[float, ShutdownStep], ...]


def _kill_at(time: float) -> Schedule:
    return ((time, ShutdownStep.KILL), (time + GIVE_UP_S, ShutdownStep.GIVE_UP))


def after_failure(now: float, grace_s: float = DEFAULT_GRACE_S) -> Schedule:
    """How the survivors of a failed worker are ended."""
    stacks = now + grace_s
    terminate = stacks + STACKS_S
    return (
        (stacks, ShutdownStep.DUMP_STACKS),
        (terminate, ShutdownStep.TERMINATE),
        *_kill_at(terminate + TERMINATION_S),
    )


def after_overdue_evaluation(now: float) -> Schedule:
    """How tasks are ended that still run long after the training."""
    return ((now, ShutdownStep.TERMINATE), *_kill_at(now + TERMINATION_S))


def after_signal(now: float, number: int) -> Schedule:
    """How all workers are ended when the launcher receives a signal: their stacks come first, since they may hang."""
    first = now + STACKS_S / 2
    if number != signal.SIGINT:
        return ((now, ShutdownStep.DUMP_STACKS), (first, ShutdownStep.TERMINATE), *_kill_at(first + INTERRUPT_GRACE_S))
    terminate = first + INTERRUPT_GRACE_S
    return (
        (now, ShutdownStep.DUMP_STACKS),
        (first, ShutdownStep.INTERRUPT),
        (terminate, ShutdownStep.TERMINATE),
        *_kill_at(terminate + TERMINATION_S),
    )


class ShutdownPlan:
    """The state of one job and the steps that are still to come. Times are arguments, by one monotonic clock.

    Args:
        grace_s: seconds that the survivors of a failed worker have to exit.
        preemption_grace_s: seconds that workers have for a checkpoint.

    Attributes:
        state: see the top of this file.
        interrupted_by: the signal that ended the job, if that and no failure was the reason.
    """

    def __init__(self, grace_s: float, preemption_grace_s: float):
        self.state = JobState.RUNNING
        self.interrupted_by: int | None = None
        self._grace_s = grace_s
        self._preemption_grace_s = preemption_grace_s
        self._schedule: Schedule = ()  # the steps that are left, the next one first
        self._finish_by: float | None = None  # when optional tasks are ended; counts in FINISHING only
        # Filled by signal handlers, emptied by the loop; append and popleft are atomic, so there is no lock.
        self._requests: deque[int] = deque()
        self._signals = 0  # how many were handled

    @property
    def is_shutting_down(self) -> bool:
        """Whether the launcher ends the job: true as soon as a signal was received, before it is handled."""
        return bool(self._requests) or self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether something has happened that ends the job."""
        return self.state not in (JobState.RUNNING, JobState.FINISHING)

    @property
    def has_signalled(self) -> bool:
        """Whether workers have received a signal, so that their exits say nothing about the cause."""
        return self.state in _SIGNALLED

    @property
    def next_due(self) -> float | None:
        """When to look again; None if nothing is planned."""
        if self._schedule:
            return self._schedule[0][0]
        return self._finish_by if self.state is JobState.FINISHING else None

    def finish_within(self, now: float, seconds: float) -> None:
        """Only tasks that no other waits for still run: they have this long."""
        if self._apply(Trigger.ONLY_OPTIONAL_LEFT, ()):
            self._finish_by = now + seconds

    def check_overdue(self, now: float) -> bool:
        """End the optional tasks once their time is over; returns whether this call did."""
        late = self._finish_by is not None and self._finish_by <= now
        return late and self._apply(Trigger.OVERDUE, after_overdue_evaluation(now))

    def fail(self, now: float) -> bool:
        """A worker failed; returns whether this is the reason to end the job."""
        return self._apply(Trigger.FAILED, after_failure(now, self._grace_s))

    def request_stop(self, number: int) -> None:
        """The launcher received this signal. Only records it, so signal handlers and other threads may call it."""
        self._requests.append(number)

    def handle_signals(self, now: float) -> int | None:
        """Act on the signals recorded so far; returns the one that is the reason to end the job, if one is. Ctrl-C
        kills at once if any signal came before it; others are repeated by schedulers, and to the whole process group,
        which must not shorten the time for a checkpoint."""
        reason = None
        while self._requests:
            number = self._requests.popleft()
            self._signals += 1
            if self._signals > 1 and number == signal.SIGINT:
                self._apply(Trigger.KILLED, _kill_at(now))
                continue
            event = Trigger.INTERRUPTED if number == signal.SIGINT else Trigger.PREEMPTED
            if self._apply(event, after_signal(now, number)):
                self.interrupted_by = reason = number
        return reason

    def allow_checkpoint(self, now: float) -> None:
        """A worker answered SIGTERM by saving a checkpoint."""
        self._apply(Trigger.CHECKPOINTING, _kill_at(now + self._preemption_grace_s))

    def pop_due_step(self, now: float) -> ShutdownStep | None:
        """The next step, if its time has come. From the first signal on, exits count as caused by the launcher."""
        if not self._schedule or self._schedule[0][0] > now:
            return None
        (_, step), *rest = self._schedule
        self._schedule = tuple(rest)
        if step is not ShutdownStep.DUMP_STACKS:  # which ends no worker
            self._apply(Trigger.SIGNALLED, self._schedule)
        return step

    def _apply(self, event: Trigger, schedule: Schedule) -> bool:
        """Follow the table; returns whether it has such a transition."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            return False
        self.state, self._schedule = state, schedule
        return True
