"""How the launcher ends a job: its states, and the steps that are due at each time.

Pure decisions: maps events and times to states and steps, which `JobSupervisor` executes. No wait is unbounded: every
schedule ends with SIGKILL, and then abandons a process that survives even SIGKILL.

    RUNNING ── FAILED ──> FAILING ── SIGNALED ───> TERMINATING
       │                                              ^  ^
       ├─ INTERRUPTED ──> INTERRUPTING ── SIGNALED ───┘  │ OVERDUE, or KILLED in any state
       ├─ PREEMPTED ────> PREEMPTING ─── SIGNALED ────> PREEMPTED ── CHECKPOINTING ──> CHECKPOINTING
       └─ OPTIONAL_TASKS_LEFT ──> FINISHING, which takes the same events as RUNNING

An event without a transition from the current state changes nothing. The first reason to end a job therefore remains
the reason: a failure during a preemption does not shorten the time for the checkpoint, and Ctrl-C after a failure does
not turn the job into an interrupted one.
"""

from __future__ import annotations

import enum
import signal
from collections import deque
from collections.abc import Mapping

from phalanx.config.environment_variables import DEFAULT_GRACE_S

# A signal handler in C writes the stacks quickly, but workers take turns if the host has fewer cores than workers.
STACKS_S = 0.5
# Between SIGTERM and SIGKILL: time to flush a file, not to write a checkpoint.
TERMINATION_S = 2.0
# After Ctrl-C or SIGTERM, the program may have work to finish.
INTERRUPT_GRACE_S = 5.0
# A killed process can hang in the kernel (a dead network file system), where nothing ends it.
ABANDON_S = 5.0


class ShutdownStep(enum.Enum):
    """An action on every task that still runs."""

    DUMP_STACKS = "dump stacks"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    KILL = "kill"
    ABANDON = "abandon"


class JobState(enum.Enum):
    """State of a job between its start and its end."""

    RUNNING = "running"
    FINISHING = "finishing"
    """Only optional tasks, which no other task waits for, still run, such as an evaluator."""
    FAILING = "failing"
    """A worker failed. The others have some time to exit on their own, so that their errors are recorded."""
    INTERRUPTING = "interrupting"
    """Ctrl-C was received; no worker has been signaled yet."""
    PREEMPTING = "preempting"
    """SIGTERM or a similar signal was received; no worker has been signaled yet."""
    PREEMPTED = "preempted"
    """Workers have received SIGTERM and may answer that they save a checkpoint first."""
    CHECKPOINTING = "checkpointing"
    """At least one worker saves a checkpoint before it exits."""
    TERMINATING = "terminating"
    """Workers have received a signal, which explains their exits from now on."""


class Trigger(enum.Enum):
    """An event that changes the state of a job."""

    OPTIONAL_TASKS_LEFT = "only optional tasks are left"
    FAILED = "a worker failed"
    INTERRUPTED = "SIGINT received"
    PREEMPTED = "another signal received"
    KILLED = "SIGINT received again"
    OVERDUE = "optional tasks run for too long"
    SIGNALED = "workers were signaled"
    CHECKPOINTING = "a worker saves a checkpoint"


_FROM_RUNNING = {
    Trigger.FAILED: JobState.FAILING,
    Trigger.INTERRUPTED: JobState.INTERRUPTING,
    Trigger.PREEMPTED: JobState.PREEMPTING,
}
TRANSITIONS: Mapping[JobState, Mapping[Trigger, JobState]] = {
    JobState.RUNNING: {**_FROM_RUNNING, Trigger.OPTIONAL_TASKS_LEFT: JobState.FINISHING},
    JobState.FINISHING: {**_FROM_RUNNING, Trigger.OVERDUE: JobState.TERMINATING},
    JobState.FAILING: {Trigger.SIGNALED: JobState.TERMINATING, Trigger.KILLED: JobState.TERMINATING},
    JobState.INTERRUPTING: {
        Trigger.SIGNALED: JobState.TERMINATING,
        Trigger.KILLED: JobState.TERMINATING,
    },
    JobState.PREEMPTING: {Trigger.SIGNALED: JobState.PREEMPTED, Trigger.KILLED: JobState.TERMINATING},
    JobState.PREEMPTED: {
        Trigger.CHECKPOINTING: JobState.CHECKPOINTING,
        Trigger.KILLED: JobState.TERMINATING,
    },
    # Every worker that saves a checkpoint gets the full time, since they do not begin at the same moment.
    JobState.CHECKPOINTING: {
        Trigger.CHECKPOINTING: JobState.CHECKPOINTING,
        Trigger.KILLED: JobState.TERMINATING,
    },
    JobState.TERMINATING: {Trigger.KILLED: JobState.TERMINATING},
}
_SIGNALED = (JobState.PREEMPTED, JobState.CHECKPOINTING, JobState.TERMINATING)

Schedule = tuple[tuple[float, ShutdownStep], ...]


def _kill_at(time: float) -> Schedule:
    return ((time, ShutdownStep.KILL), (time + ABANDON_S, ShutdownStep.ABANDON))


def after_failure(now: float, grace_s: float = DEFAULT_GRACE_S) -> Schedule:
    """Steps that end the survivors of a failed worker."""
    stacks = now + grace_s
    terminate = stacks + STACKS_S
    return (
        (stacks, ShutdownStep.DUMP_STACKS),
        (terminate, ShutdownStep.TERMINATE),
        *_kill_at(terminate + TERMINATION_S),
    )


def after_overdue_evaluation(now: float) -> Schedule:
    """Steps that end tasks that still run long after the training."""
    return ((now, ShutdownStep.TERMINATE), *_kill_at(now + TERMINATION_S))


def after_signal(now: float, number: int) -> Schedule:
    """Steps that end all workers after the launcher received a signal. First their stacks, since they may hang."""
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
    """The state of one job and its remaining steps. All times are arguments, from one monotonic clock.

    Args:
        grace_s: Seconds for the survivors of a failed worker to exit.
        preemption_grace_s: Seconds for workers to save a checkpoint.

    Attributes:
        state: See the module docstring.
        interrupted_by: The signal that ended the job, if a signal, not a failure, was the reason.
    """

    def __init__(self, grace_s: float, preemption_grace_s: float):
        self.state = JobState.RUNNING
        self.interrupted_by: int | None = None
        self._grace_s = grace_s
        self._preemption_grace_s = preemption_grace_s
        self._schedule: Schedule = ()  # the remaining steps, the next one first
        self._optional_deadline: float | None = None  # when optional tasks are ended; used in FINISHING only
        # Filled by signal handlers and emptied by the loop. No lock: append and popleft are atomic.
        self._requests: deque[int] = deque()
        self._signals = 0  # number of handled signals

    @property
    def is_shutting_down(self) -> bool:
        """Whether the launcher is ending the job: true as soon as a signal is received, before it is handled."""
        return bool(self._requests) or self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether an event has begun to end the job."""
        return self.state not in (JobState.RUNNING, JobState.FINISHING)

    @property
    def has_signaled(self) -> bool:
        """Whether workers have received a signal, so that their exits reveal nothing about the cause."""
        return self.state in _SIGNALED

    @property
    def next_due(self) -> float | None:
        """Time of the next check; None if nothing is scheduled."""
        if self._schedule:
            return self._schedule[0][0]
        return self._optional_deadline if self.state is JobState.FINISHING else None

    def set_optional_deadline(self, now: float, seconds: float) -> None:
        """Limit the time of the remaining tasks, because no other task waits for them."""
        if self._apply(Trigger.OPTIONAL_TASKS_LEFT, ()):
            self._optional_deadline = now + seconds

    def check_overdue(self, now: float) -> bool:
        """End the optional tasks once their time is over; return whether this call did."""
        late = self._optional_deadline is not None and self._optional_deadline <= now
        return late and self._apply(Trigger.OVERDUE, after_overdue_evaluation(now))

    def fail(self, now: float) -> bool:
        """Record the failure of a worker; return whether it is the reason to end the job."""
        return self._apply(Trigger.FAILED, after_failure(now, self._grace_s))

    def request_stop(self, number: int) -> None:
        """Record a signal that the launcher received, without acting on it. Safe in signal handlers and all threads."""
        self._requests.append(number)

    def handle_signals(self, now: float) -> int | None:
        """Act on the recorded signals; return the one that is the reason to end the job, if any. Ctrl-C after any other
        signal kills immediately. Other signals do not: schedulers repeat them and send them to the whole process group,
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
        """Extend the schedule for a worker that answered SIGTERM by saving a checkpoint."""
        self._apply(Trigger.CHECKPOINTING, _kill_at(now + self._preemption_grace_s))

    def pop_due_step(self, now: float) -> ShutdownStep | None:
        """Return the next step if it is due. From the first signal on, exits count as caused by the launcher."""
        if not self._schedule or self._schedule[0][0] > now:
            return None
        (_, step), *rest = self._schedule
        self._schedule = tuple(rest)
        if step is not ShutdownStep.DUMP_STACKS:  # dumping stacks ends no worker
            self._apply(Trigger.SIGNALED, self._schedule)
        return step

    def _apply(self, event: Trigger, schedule: Schedule) -> bool:
        """Take the transition for `event`; return whether there is one."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            return False
        self.state, self._schedule = state, schedule
        return True
