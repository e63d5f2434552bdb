"""The loop over a job's life: start the workers, show what they write, and end all of them when one fails.

How a job is ended is a schedule, decided at once when the reason to end it comes (`after_failure`,
`after_signal`) and worked off by the clock. Ends are never waited for without a bound: the last step is
SIGKILL.
"""

from __future__ import annotations

import enum
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from phalanx.errors import EvictedError
from phalanx.launcher.environment import DEFAULT_EVALUATOR_GRACE_S, DEFAULT_GRACE_S
from phalanx.launcher.messages import Event, Exited, LastWords, Order, Output, Started
from phalanx.launcher.restarts import Restarts
from phalanx.launcher.verdict import End, Verdict, judge
from phalanx.launcher.waker import Waker

# A signal handler in C writes the stacks: quick, but a host with more workers than cores takes turns.
STACKS_S = 0.5
# Between SIGTERM and SIGKILL: time to flush a file, not to write a checkpoint.
TERMINATION_S = 2.0
# After Ctrl-C or SIGTERM the program may have something to finish.
INTERRUPT_GRACE_S = 5.0
# A killed process can hang in the kernel (a dead network file system). Nobody can help it.
GIVE_UP_S = 5.0
POLL_S = 0.05
# Tasks of this type end after the others.
EVALUATORS = "evaluator/"
SERVERS = "ps/"


class Host(Protocol):
    """Where workers run: `LocalHost` or `RemoteHost`."""

    name: str

    @property
    def needs_polling(self) -> bool: ...

    def start(self, orders: Sequence[Order]) -> list[Event]: ...

    def restart(self, rank: int) -> Event | None: ...

    def events(self) -> list[Event]: ...

    def dump_stacks(self, rank: int) -> None: ...

    def signal(self, rank: int, number: int) -> None: ...

    def close(self) -> None: ...


class Step(enum.Enum):
    """A step towards the end of all workers that still run."""

    DUMP_STACKS = "dump stacks"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    KILL = "kill"
    GIVE_UP = "give up"


Schedule = tuple[tuple[float, Step], ...]


def after_failure(now: float, grace_s: float = DEFAULT_GRACE_S) -> Schedule:
    """How the survivors of a failed worker are ended."""
    stacks = now + grace_s
    terminate = stacks + STACKS_S
    kill = terminate + TERMINATION_S
    return (
        (stacks, Step.DUMP_STACKS),
        (terminate, Step.TERMINATE),
        (kill, Step.KILL),
        (kill + GIVE_UP_S, Step.GIVE_UP),
    )


def after_overdue_evaluation(now: float) -> Schedule:
    """How an evaluator is ended that does not come to its end after the training."""
    kill = now + TERMINATION_S
    return ((now, Step.TERMINATE), (kill, Step.KILL), (kill + GIVE_UP_S, Step.GIVE_UP))


def after_signal(now: float, number: int, grace_s: float = INTERRUPT_GRACE_S) -> Schedule:
    """How all workers are ended when the launcher is told to end: their stacks first, since they may hang."""
    first = now + STACKS_S / 2
    if number != signal.SIGINT:
        kill = first + grace_s
        return (
            (now, Step.DUMP_STACKS),
            (first, Step.TERMINATE),
            (kill, Step.KILL),
            (kill + GIVE_UP_S, Step.GIVE_UP),
        )
    terminate = first + grace_s
    kill = terminate + TERMINATION_S
    return (
        (now, Step.DUMP_STACKS),
        (first, Step.INTERRUPT),
        (terminate, Step.TERMINATE),
        (kill, Step.KILL),
        (kill + GIVE_UP_S, Step.GIVE_UP),
    )


@dataclass
class Outcome:
    """A job that has ended.

    Attributes:
        verdict: why.
        ends: of all workers, by rank.
        results: pickled results of workers that ran a function, by rank.
    """

    verdict: Verdict
    ends: list[End]
    results: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker: its order, its task's name and the host that runs it."""

    order: Order
    task: str
    host: Host


class Observer(Protocol):
    """Who is told what happens."""

    def output(self, rank: int, is_error: bool, data: bytes) -> None: ...

    def started(self, rank: int, pid: int) -> None: ...

    def exited(self, end: End) -> None: ...

    def returns(self, end: End, count: str) -> None:
        """A worker was killed and is started again; `count` says how often so far."""
        ...

    def failed(self, end: End) -> None:
        """The first failure, upon which the job is being ended."""
        ...

    def overdue(self, tasks: Sequence[str], seconds: float) -> None:
        """Evaluators that still run so long after the training, and are being ended."""
        ...


class Job:
    """Runs the workers of one job to their end. `start`, then `run`, each once."""

    def __init__(
        self,
        placements: Sequence[Placement],
        selector: selectors.BaseSelector,
        observer: Observer,
        *,
        grace_s: float = DEFAULT_GRACE_S,
        restarts: int = 0,
        evaluator_grace_s: float = DEFAULT_EVALUATOR_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._placements = {placement.order.rank: placement for placement in placements}
        self._hosts = list(dict.fromkeys(placement.host for placement in placements))
        self._selector = selector
        self._waker = Waker(selector)
        self._observer = observer
        self._grace_s = grace_s
        self._evaluator_grace_s = evaluator_grace_s
        self._evaluates_until: float | None = None  # once only evaluators are left
        self._clock = clock
        self._pids: dict[int, int] = {}
        self._restarts = Restarts(restarts)
        self._started: dict[int, float] = {}
        self._returning: dict[int, tuple[float, End]] = {}  # when to start which tasks again
        self._ends: dict[int, End] = {}
        self._results: dict[int, bytes] = {}
        self._schedule: Schedule = ()
        self._stop_requests: deque[int] = deque()
        self._stopped_by: int | None = None  # the signal, if that and no failure was the reason to end
        self._stops = 0
        self._ending = False  # whether the launcher has sent a signal to end
        self._hung: set[int] = set()

    def stop(self, number: int) -> None:
        """End the job because this process received signal `number`; the second time at once.

        Only makes a note and wakes the loop, so that signal handlers and other threads may call it at any
        time.
        """
        self._stop_requests.append(number)
        self._waker.wake()

    @property
    def wakeup_fd(self) -> int:
        """For `signal.set_wakeup_fd`: a signal then interrupts the loop's sleep at once."""
        return self._waker.fileno()

    def start(self) -> None:
        """Start the workers. If that fails, those already started are ended."""
        try:
            for host in self._hosts:
                orders = [p.order for p in self._placements.values() if p.host is host]
                for event in host.start(orders):
                    self._take(event)
        except BaseException:
            self._close()
            raise

    def run(self) -> Outcome:
        """Return when all workers, which `start` has started, have ended. On any exception all are killed."""
        try:
            while len(self._ends) < len(self._placements):
                self._selector.select(self._timeout())
                self._waker.drain()
                for host in self._hosts:
                    for event in host.events():
                        self._take(event)
                self._act()
                self._restart()
        finally:
            self._close()
        ends = [self._ends[rank] for rank in sorted(self._ends)]
        return Outcome(judge(ends, interrupted_by=self._stopped_by), ends, self._results)

    def _close(self) -> None:
        for host in self._hosts:
            host.close()
        self._waker.close()

    def _timeout(self) -> float | None:
        waits = [POLL_S] if any(host.needs_polling for host in self._hosts) else []
        if self._schedule:
            waits.append(max(0.0, self._schedule[0][0] - self._clock()))
        elif self._evaluates_until is not None:
            waits.append(max(0.0, self._evaluates_until - self._clock()))
        waits += [max(0.0, due - self._clock()) for due, _ in self._returning.values()]
        return min(waits, default=None)

    def _take(self, event: Event) -> None:
        match event:
            case Output(rank, error, data):
                self._observer.output(rank, error, data)
            case Started(rank, pid):
                self._pids[rank] = pid
                self._started[rank] = self._clock()
                self._observer.started(rank, pid)
            case Exited(rank, returncode, words, result):
                placement = self._placements[rank]
                end = End(
                    rank=rank,
                    task=placement.task,
                    host=placement.host.name,
                    pid=self._pids.get(rank, 0),
                    returncode=returncode,
                    order=len(self._ends),
                    by_launcher=self._ending or (returncode == EvictedError.exit_code and 0 in self._ends),
                    hung=rank in self._hung,
                    words=words,
                )
                if result:
                    self._results[rank] = result
                self._observer.exited(end)
                delay_s = self._delay_s(placement, end)
                if delay_s is not None:
                    self._returning[rank] = (self._clock() + delay_s, end)
                    self._observer.returns(end, self._restarts.describe(rank))
                    return
                self._ends[rank] = end
                if end.failed and not end.by_launcher and not self._schedule:
                    self._schedule = after_failure(self._clock(), self._grace_s)
                    self._observer.failed(end)
                if not self._schedule and self._evaluates_until is None and self._is_over():
                    self._evaluates_until = self._clock() + self._evaluator_grace_s

    def _is_over(self) -> bool:
        """Whether nobody waits for those that still run: evaluators, and, where there are servers and these and the
        chief have ended, workers that were left out."""
        left = [p.task for rank, p in self._placements.items() if rank not in self._ends]
        served = any(p.task.startswith(SERVERS) for p in self._placements.values())
        if served and 0 in self._ends and not any(task.startswith(SERVERS) for task in left):
            return True
        return all(task.startswith(EVALUATORS) for task in left)

    def _delay_s(self, placement: Placement, end: End) -> float | None:
        """Seconds after which an ended task is started again; None: it is not. Nobody returns to a job that ends, or
        whose chief has finished."""
        if not placement.order.returns or self._is_ending or 0 in self._ends:
            return None
        lived_s = self._clock() - self._started.get(end.rank, self._clock())
        return self._restarts.delay_s(end.rank, end.returncode, lived_s)

    @property
    def _is_ending(self) -> bool:
        return bool(self._schedule or self._stop_requests or self._ending)

    def _restart(self) -> None:
        """Start those again whose time has come; if the job is ending, they have ended."""
        for rank, (due, end) in list(self._returning.items()):
            if self._is_ending:
                del self._returning[rank]
                self._ends[rank] = replace(end, order=len(self._ends))
            elif due <= self._clock():
                del self._returning[rank]
                if event := self._placements[rank].host.restart(rank):
                    self._take(event)

    def _act(self) -> None:
        while self._stop_requests:
            number, now = self._stop_requests.popleft(), self._clock()
            self._stops += 1
            if self._stops > 1:
                self._schedule = ((now, Step.KILL), (now + GIVE_UP_S, Step.GIVE_UP))
            elif not self._schedule:  # else a failure came first and all are being ended already
                self._stopped_by = number
                self._schedule = after_signal(now, number)
        if self._evaluates_until is not None and not self._schedule and self._evaluates_until <= self._clock():
            self._schedule = after_overdue_evaluation(self._clock())
            late = [p.task for rank, p in self._placements.items() if rank not in self._ends]
            self._observer.overdue(late, self._evaluator_grace_s)
        while self._schedule and self._schedule[0][0] <= self._clock():
            step = self._schedule[0][1]
            self._schedule = self._schedule[1:]
            running = [p for rank, p in self._placements.items() if rank not in self._ends]
            for placement in running:
                rank, host = placement.order.rank, placement.host
                match step:
                    case Step.DUMP_STACKS:
                        if self._stopped_by is None:
                            self._hung.add(rank)
                        host.dump_stacks(rank)
                    case Step.INTERRUPT:
                        host.signal(rank, signal.SIGINT)
                    case Step.TERMINATE:
                        host.signal(rank, signal.SIGTERM)
                    case Step.KILL:
                        host.signal(rank, signal.SIGKILL)
                    case Step.GIVE_UP:
                        self._take(Exited(rank, -signal.SIGKILL, LastWords()))
            if step is not Step.DUMP_STACKS:
                self._ending = True
