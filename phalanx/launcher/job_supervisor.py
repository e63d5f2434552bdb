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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from msgspec.structs import replace as replace_words

from phalanx.config.variables import DEFAULT_EVALUATOR_GRACE_S, DEFAULT_GRACE_S, DEFAULT_PREEMPTION_GRACE_S
from phalanx.errors import EvictedError, PeerLostError, PreemptedError, RendezvousError
from phalanx.launcher.host_messages import (
    CheckpointBeforeExit,
    CrashReported,
    Event,
    Exited,
    HostOrder,
    Output,
    Started,
    StepTimingReported,
)
from phalanx.launcher.restart_policy import RestartPolicy
from phalanx.launcher.root_cause import RootCause, WorkerEnd, find_root_cause
from phalanx.launcher.selector_waker import SelectorWaker
from phalanx.monitoring.console import LineAssembler, without_escapes
from phalanx.runtime.exit_codes import CONSEQUENCES

# A signal handler in C writes the stacks: quick, but a host with more workers than cores takes turns.
STACKS_S = 0.5
# Between SIGTERM and SIGKILL: time to flush a file, not to write a checkpoint.
TERMINATION_S = 2.0
# After Ctrl-C or SIGTERM the program may have something to finish.
INTERRUPT_GRACE_S = 5.0
# A killed process can hang in the kernel (a dead network file system). Nobody can help it.
GIVE_UP_S = 5.0
# When the chief and all servers have finished well, a worker that they have left out has nothing to do.
LEFT_OUT_S = 10.0
# A task that was started again so shortly before the chief or the servers ended may never have heard of them.
BELATED_S = 10.0
# A worker that is not wanted any more ends by itself, which takes seconds at most.
RELEASE_S = 60.0
# Of what a task has written to its standard error, or to both outputs where they are one, for the page where it left no
# traceback.
SAID_BYTES = 4096
SAID_LINES = 8
POLL_S = 0.05
# How often those who watch over a job's pace, and a job that is idle, look at all.
PACE_S = 1.0
# Tasks of this type end after the others.
EVALUATORS = "evaluator/"
SERVERS = "ps/"


class WorkerHost(Protocol):
    """Where workers run: `LocalHost` or `RemoteHost`."""

    name: str
    lost: bool

    @property
    def needs_polling(self) -> bool: ...

    def start(self, orders: Sequence[HostOrder]) -> list[Event]: ...

    def restart(self, rank: int) -> Event | None: ...

    def events(self) -> list[Event]: ...

    def dump_stacks(self, rank: int) -> None: ...

    def signal(self, rank: int, number: int) -> None: ...

    def close(self) -> None: ...


class ShutdownStep(enum.Enum):
    """A step towards the end of all workers that still run."""

    DUMP_STACKS = "dump stacks"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    KILL = "kill"
    GIVE_UP = "give up"


Schedule = tuple[tuple[float, ShutdownStep], ...]


def after_failure(now: float, grace_s: float = DEFAULT_GRACE_S) -> Schedule:
    """How the survivors of a failed worker are ended."""
    stacks = now + grace_s
    terminate = stacks + STACKS_S
    kill = terminate + TERMINATION_S
    return (
        (stacks, ShutdownStep.DUMP_STACKS),
        (terminate, ShutdownStep.TERMINATE),
        (kill, ShutdownStep.KILL),
        (kill + GIVE_UP_S, ShutdownStep.GIVE_UP),
    )


def after_overdue_evaluation(now: float) -> Schedule:
    """How an evaluator is ended that does not come to its end after the training."""
    kill = now + TERMINATION_S
    return ((now, ShutdownStep.TERMINATE), (kill, ShutdownStep.KILL), (kill + GIVE_UP_S, ShutdownStep.GIVE_UP))


def after_notice(now: float, grace_s: float) -> Schedule:
    """How workers are ended that were told to end and take a checkpoint."""
    kill = now + grace_s
    return ((kill, ShutdownStep.KILL), (kill + GIVE_UP_S, ShutdownStep.GIVE_UP))


def after_signal(now: float, number: int, grace_s: float = INTERRUPT_GRACE_S) -> Schedule:
    """How all workers are ended when the launcher is told to end: their stacks first, since they may hang."""
    first = now + STACKS_S / 2
    if number != signal.SIGINT:
        kill = first + grace_s
        return (
            (now, ShutdownStep.DUMP_STACKS),
            (first, ShutdownStep.TERMINATE),
            (kill, ShutdownStep.KILL),
            (kill + GIVE_UP_S, ShutdownStep.GIVE_UP),
        )
    terminate = first + grace_s
    kill = terminate + TERMINATION_S
    return (
        (now, ShutdownStep.DUMP_STACKS),
        (first, ShutdownStep.INTERRUPT),
        (terminate, ShutdownStep.TERMINATE),
        (kill, ShutdownStep.KILL),
        (kill + GIVE_UP_S, ShutdownStep.GIVE_UP),
    )


@dataclass
class JobOutcome:
    """A job that has ended.

    Attributes:
        verdict: why.
        ends: of all workers, by rank.
        results: pickled results of workers that ran a function, by rank.
    """

    verdict: RootCause
    ends: list[WorkerEnd]
    results: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """A worker: its order, its task's name and the host that runs it."""

    order: HostOrder
    task: str
    host: WorkerHost


class SlotProvider(Protocol):
    """Who says where the workers of an elastic job run (`pool.Pool`). Called from the thread that runs the job."""

    def left(self, rank: int, *, failed: bool) -> bool:
        """A worker has ended, which is not the end of its part in the job; returns whether it can be started again at
        its place. Else its seat is vacant."""
        ...

    def retire(self, rank: int) -> None:
        """A worker has ended for good."""
        ...

    def want(self, workers: int) -> None:
        """So many workers are wanted from now on."""
        ...

    def tick(self) -> float | None:
        """See to what has changed, starting workers where there is room; returns after how many seconds to call again
        at the latest, None for no matter when. It is called after everything that happens."""
        ...


class JobObserver(Protocol):
    """Who is told what happens."""

    def output(self, rank: int, is_error: bool, data: bytes) -> None: ...

    def started(self, rank: int, pid: int) -> None: ...

    def exited(self, end: WorkerEnd) -> None: ...

    def paced(self, pace: StepTimingReported) -> None:
        """How a worker of a job of fixed size goes, about once a second."""
        ...

    def returns(self, end: WorkerEnd, count: str) -> None:
        """A worker was killed and is started again; `count` says how often so far."""
        ...

    def failed(self, end: WorkerEnd) -> None:
        """The first failure, upon which the job is being ended."""
        ...

    def left_behind(self, end: WorkerEnd) -> None:
        """A worker among servers has lost them, and is not started again: the others go on without it."""
        ...

    def overdue(self, tasks: Sequence[str], seconds: float) -> None:
        """Evaluators, or workers that were left out, that still run so long after the training, and are being ended."""
        ...


class JobSupervisor:
    """Runs the workers of one job to their end. `start`, then `run`, each once.

    Args:
        merged: stdout and stderr of workers on this host come as one.

    Attributes:
        on_loss: is told the task of a process that has ended, and not well.
    """

    def __init__(
        self,
        placements: Sequence[WorkerPlacement],
        selector: selectors.BaseSelector,
        observer: JobObserver,
        *,
        merged: bool = False,
        grace_s: float = DEFAULT_GRACE_S,
        restarts: int = 0,
        seating: SlotProvider | None = None,
        evaluator_grace_s: float = DEFAULT_EVALUATOR_GRACE_S,
        preemption_grace_s: float = DEFAULT_PREEMPTION_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._placements = {placement.order.rank: placement for placement in placements}
        self._hosts = list(dict.fromkeys(placement.host for placement in placements))
        self._selector = selector
        self._waker = SelectorWaker(selector)
        self._observer = observer
        self._merged = merged
        self._grace_s = grace_s
        self._evaluator_grace_s = evaluator_grace_s
        self._preemption_grace_s = preemption_grace_s
        self._evaluates_until: float | None = None  # once only evaluators are left
        self._clock = clock
        self.on_loss: Callable[[str], None] = lambda task: None
        self._pids: dict[int, int] = {}
        self._seating = seating
        self._elastic = seating is not None
        self._ends_before_giving_up: int | None = None
        self._released: set[int] = set()
        self._idle: set[int] = set()  # seats that are vacant
        self._unneeded: set[int] = set()
        self._leaving: dict[int, float] = {}  # until when those who are not wanted any more may take to end
        self._killed: dict[int, float] = {}  # until when those who were killed at the end
        self._restarts = RestartPolicy(restarts, elastic=self._elastic)
        self._seating_due: float | None = None
        self._started: dict[int, float] = {}
        self._returning: dict[int, tuple[float, WorkerEnd]] = {}  # when to start which tasks again
        self._fallen: dict[int, WorkerEnd] = {}  # the last ends of those that were started again
        self._ends: dict[int, WorkerEnd] = {}
        self._results: dict[int, bytes] = {}
        self._schedule: Schedule = ()
        self._stop_requests: deque[int] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._stopped_by: int | None = None  # the signal, if that and no failure was the reason to end
        self._stops = 0
        self._impatient = False  # whether it is to end at once
        self._ending = False  # whether the launcher has sent a signal to end
        self._hung: set[int] = set()
        self._said: dict[tuple[int, bool], bytes] = {}  # the end of each task's outputs, by whether it is stderr

    def stop(self, number: int) -> None:
        """End the job because this process received signal `number`; at once if that is SIGINT and not the first one.

        Others are repeated by schedulers, and to the whole group, which takes nothing from the time for a checkpoint.

        Only makes a note and wakes the loop, so that signal handlers and other threads may call it at any
        time.
        """
        self._stop_requests.append(number)
        self._waker.wake()

    def run_soon(self, errand: Callable[[], None]) -> None:
        """Call `errand` in the thread that runs the job; may be called from any other."""
        self._errands.append(errand)
        self._waker.wake()

    def kill(self, task: str) -> None:
        """Kill a task, which is then treated as any that was killed. From the thread that runs the job."""
        for rank, placement in self._placements.items():
            if placement.task == task and rank not in self._ends:
                placement.host.signal(rank, signal.SIGKILL)

    def release(self, task: str) -> None:
        """This worker of an elastic job is not wanted any more: its end is neither that of the job nor a failure."""
        for rank, placement in self._placements.items():
            if placement.task == task:
                self._released.add(rank)
                self._leaving[rank] = self._clock() + RELEASE_S

    def recall(self, workers: int) -> None:
        """So many workers are wanted in an elastic job."""
        if self._seating is not None:
            self._seating.want(workers)

    @property
    def placements(self) -> Mapping[int, WorkerPlacement]:
        """The tasks that have been started, by rank, where they run or ran last."""
        return self._placements

    @property
    def takes_workers(self) -> bool:
        """Whether a worker that is started now could take part still."""
        return not self.is_ending and not self._is_finished and self._ends_before_giving_up is None

    def seat(self, placement: WorkerPlacement) -> None:
        """Start a worker of an elastic job, on a vacant seat. From the thread that runs the job."""
        rank = placement.order.rank
        self._placements[rank] = placement
        self._idle.discard(rank)
        self._released.discard(rank)
        self._leaving.pop(rank, None)
        self.watch(placement.host)
        for event in placement.host.start([placement.order]):
            self._take(event)

    def watch(self, host: WorkerHost) -> None:
        """Hear of this host, on which workers may be started. From the thread that runs the job."""
        if host not in self._hosts:
            self._hosts.append(host)
            for event in host.start([]):
                self._take(event)

    def forget(self, host: WorkerHost) -> None:
        """Nothing runs on this host any more. From the thread that runs the job."""
        if host in self._hosts:
            self._hosts.remove(host)

    def give_up(self) -> None:
        """Nobody, or not enough, is left of an elastic job: all who still run are being ended."""
        if self._ends_before_giving_up is None:
            self._ends_before_giving_up = len(self._ends)
        if not self._schedule:
            self._schedule = after_failure(self._clock(), self._grace_s)

    def end_others(self, tasks: Sequence[str]) -> None:
        """These workers of an elastic job have finished: whoever was about to join them is not needed any more."""
        for rank, (_, end) in list(self._returning.items()):
            if not self._placements[rank].order.trains:
                continue
            del self._returning[rank]
            self._unneeded.add(rank)
            self._ends[rank] = replace(end, order=len(self._ends), by_launcher=True)
        for rank, placement in self._placements.items():
            if rank not in self._ends and placement.order.trains and placement.task not in tasks:
                self._unneeded.add(rank)
                self._killed[rank] = self._clock() + GIVE_UP_S
                placement.host.signal(rank, signal.SIGKILL)

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

    def run(self) -> JobOutcome:
        """Return when all workers, which `start` has started, have ended. On any exception all are killed."""
        try:
            while len(self._ends) + len(self._idle) < len(self._placements) or self._is_deserted:
                self._selector.select(self._timeout())
                self._waker.drain()
                while self._errands:
                    self._errands.popleft()()
                for host in list(self._hosts):
                    for event in host.events():
                        self._take(event)
                self._act()
                self._restart()
                if self._seating is not None:
                    wait_s = self._seating.tick()
                    self._seating_due = None if wait_s is None else self._clock() + wait_s
        finally:
            self._close()
        ends = [self._ends[rank] for rank in sorted(self._ends)]
        verdict = find_root_cause(self._causes(ends), interrupted_by=self._stopped_by)
        if verdict.success and self._ends_before_giving_up is not None:
            verdict = RootCause(RendezvousError.exit_code, None, "no worker was left, and none came")
        return JobOutcome(verdict, ends, self._results)

    @property
    def _is_deserted(self) -> bool:
        """Whether an elastic job that has not come to its end has no worker. How long it waits for others, its keeper
        decides."""
        trains = [rank for rank, placement in self._placements.items() if placement.order.trains]
        return self._elastic and self.takes_workers and bool(trains) and self._idle.issuperset(trains)

    def _causes(self, ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
        """The ends to judge the job by. One of which nobody was left to go on failed by those whom it lost, though they
        were just being started again: what became of these is a consequence, unless they had gone on and met an error
        of their own."""
        before = self._ends_before_giving_up
        if before is None:
            return list(ends)
        causes = [self._fallen.get(end.rank, end) if _is_echo(end, before) else end for end in ends]
        causes += [self._fallen[rank] for rank in sorted(self._idle) if rank in self._fallen]
        return [replace(end, outlived=False) for end in causes]

    def _close(self) -> None:
        for host in self._hosts:
            host.close()
        self._waker.close()

    def _timeout(self) -> float | None:
        waits = [POLL_S] if any(host.needs_polling for host in self._hosts) else [PACE_S]
        if self._schedule:
            waits.append(max(0.0, self._schedule[0][0] - self._clock()))
        elif self._evaluates_until is not None:
            waits.append(max(0.0, self._evaluates_until - self._clock()))
        dues = [*(due for due, _ in self._returning.values()), *self._leaving.values(), *self._killed.values()]
        waits += [max(0.0, due - self._clock()) for due in dues]
        if self._seating_due is not None:
            waits.append(max(0.0, self._seating_due - self._clock()))
        return min(waits, default=None)

    def _take(self, event: Event) -> None:
        match event:
            case Output(rank, error, data):
                if error or self._merged:
                    self._said[rank, error] = (self._said.get((rank, error), b"") + data)[-SAID_BYTES:]
                self._observer.output(rank, error, data)
            case Started(rank, pid):
                self._pids[rank] = pid
                self._started[rank] = self._clock()
                for error in (False, True):
                    self._said.pop((rank, error), None)
                self._observer.started(rank, pid)
            case StepTimingReported():
                self._observer.paced(event)
            case CheckpointBeforeExit(_):
                if self._stopped_by not in (None, signal.SIGINT) and not self._impatient:
                    self._schedule = after_notice(self._clock(), self._preemption_grace_s)
            case Exited(rank, returncode, words, result):
                self._leaving.pop(rank, None)
                self._killed.pop(rank, None)
                placement = self._placements[rank]
                if returncode and words.error is None:
                    words = replace_words(words, output=self._last_lines(rank))
                end = WorkerEnd(
                    rank=rank,
                    task=placement.task,
                    host=placement.host.name,
                    pid=self._pids.get(rank, 0),
                    returncode=returncode,
                    order=len(self._ends),
                    by_launcher=self._ending
                    or rank in self._unneeded
                    or (returncode == EvictedError.exit_code and 0 in self._ends)
                    or (returncode == PeerLostError.exit_code and self._was_left_out(placement)),
                    outlived=self._is_outlived(placement, returncode)
                    or self._has_lost_contact(placement, returncode, words),
                    hung=rank in self._hung,
                    trains=placement.order.trains,
                    words=words,
                )
                if result:
                    self._results[rank] = result
                self._observer.exited(end)
                if end.failed:
                    self.on_loss(end.task)
                if self._vacates(placement, end):
                    self._idle.add(rank)
                    return
                delay_s = self._delay_s(placement, end)
                if delay_s is not None and not self._keeps_its_place(placement):
                    self._fallen[rank] = end
                    self._idle.add(rank)
                    return
                if delay_s is not None:
                    self._returning[rank] = (self._clock() + delay_s, end)
                    self._fallen[rank] = end
                    self._observer.returns(end, self._restarts.describe(rank))
                    return
                self._take_end(end)

    def _last_lines(self, rank: int) -> str:
        assembler = LineAssembler()  # a progress bar is one line
        said = self._said.get((rank, True)) or self._said.get((rank, False), b"")
        text = said.decode(errors="replace").replace("\r\n", "\n")
        lines = [without_escapes(line) for line in [*assembler.feed(text), *assembler.finish()]]
        return "\n".join(line for line in lines[-SAID_LINES:] if line.strip())

    def _take_end(self, end: WorkerEnd) -> None:
        """A task has ended for good."""
        self._ends[end.rank] = end
        if self._seating is not None:
            self._seating.retire(end.rank)
        if end.failed and not end.by_launcher and not self._schedule:
            if not end.outlived:
                self._schedule = after_failure(self._clock(), self._grace_s)
                self._observer.failed(end)
            elif not self._elastic:  # whose seating says so
                self._observer.left_behind(end)
        if not self._schedule and self._evaluates_until is None and self._is_over():
            self._evaluates_until = self._clock() + self._last_grace_s

    def _vacates(self, placement: WorkerPlacement, end: WorkerEnd) -> bool:
        """Whether a worker that has ended leaves a seat behind for another place: it was sent away, or lost with its
        host."""
        seating, rank = self._seating, end.rank
        if seating is None or not placement.order.trains:
            return False
        released = rank in self._released and not self.is_ending
        if released or (end.returncode is None and self._may_return(placement, end)):
            seating.left(rank, failed=not released)
            return True
        return False

    def _keeps_its_place(self, placement: WorkerPlacement) -> bool:
        seating, order = self._seating, placement.order
        return seating is None or not order.trains or seating.left(order.rank, failed=True)

    @property
    def _running(self) -> list[WorkerPlacement]:
        return [p for rank, p in self._placements.items() if rank not in self._ends and rank not in self._idle]

    def _is_over(self) -> bool:
        """Whether nobody waits for those that still run: evaluators; servers whose workers have all ended; and, where
        there are servers and these and the chief have ended, workers that were left out."""
        running = self._running
        if self._has_servers and not any(p.order.trains for p in running) and not self._returning:
            return True
        servers = [p for p in running if p.task.startswith(SERVERS)]
        # Who was started again when the job was over already hears nothing of its end.
        if self._has_servers and 0 in self._ends and all(self._is_belated(p.order.rank) for p in servers):
            return True
        if self._servers_have_finished and not servers and 0 not in self._ends and self._is_belated(0):
            return True
        return all(p.task.startswith(EVALUATORS) for p in running)

    def _is_belated(self, rank: int) -> bool:
        """Whether a task was started again at about the time when the others ended."""
        return rank in self._fallen and self._clock() - self._started.get(rank, self._clock()) < BELATED_S

    @property
    def _has_servers(self) -> bool:
        return any(p.task.startswith(SERVERS) for p in self._placements.values())

    @property
    def _servers_have_finished(self) -> bool:
        """Whether a server has ended well, as they do when the job is over."""
        return any(
            end.returncode == 0 and self._placements[rank].task.startswith(SERVERS) for rank, end in self._ends.items()
        )

    @property
    def _last_grace_s(self) -> float:
        """How long those may still run for whom nobody waits: evaluators; workers whom the servers have left out have
        nothing to do any more."""
        evaluates = any(placement.task.startswith(EVALUATORS) for placement in self._running)
        return self._evaluator_grace_s if evaluates else min(self._evaluator_grace_s, LEFT_OUT_S)

    def _was_left_out(self, placement: WorkerPlacement) -> bool:
        """Whether a worker ends when the chief and all servers have finished well: these do not wait for one that was
        left out, and which cannot know it."""
        servers = [rank for rank, p in self._placements.items() if p.task.startswith(SERVERS)]
        finished = [0, *servers]
        return (
            bool(servers)
            and placement.order.trains
            and all(rank in self._ends and not self._ends[rank].failed for rank in finished)
        )

    def _is_outlived(self, placement: WorkerPlacement, returncode: int | None) -> bool:
        """Whether a worker of an elastic job has failed while others train on. When all others have finished, nobody
        does for it what it was about to do."""
        if not self._elastic or not placement.order.trains or returncode == 0:
            return False
        others = [p.order.rank for p in self._placements.values() if p.order.trains and p is not placement]
        gone = {*self._ends, *self._returning, *self._idle}
        return any(rank not in gone for rank in others)

    def _has_lost_contact(self, placement: WorkerPlacement, returncode: int | None, words: CrashReported) -> bool:
        """Whether a worker has ended because it, and not the chief, does not reach the servers any more, or because it,
        and not the other workers, does not reach the chief; or with its host: the others go on without it. What ends
        because a server is gone for good ends with the job."""
        rank = placement.order.rank
        if rank == 0 or not placement.order.trains or not self._has_servers or not self._restarts.any:
            return False
        if self.is_ending:  # nobody goes on, and it may be the cause
            return False
        if returncode is None or self._misses_a_task(rank, words):
            return True
        is_late = words.error is not None and words.error.code == RendezvousError.exit_code
        return is_late and rank in self._fallen and self._fallen[rank].outlived

    def _misses_a_task(self, rank: int, words: CrashReported) -> bool:
        """Whether a worker ended because it alone, as far as is known, lost a server or the chief, or the way to it."""
        if (words.missed or "").startswith(SERVERS):
            return True  # if that is gone, the chief will miss it too
        others = [p.order.rank for p in self._running if p.order.trains and p.order.rank not in (0, rank)]
        return words.missed == self._placements[0].task and any(other not in self._returning for other in others)

    def _delay_s(self, placement: WorkerPlacement, end: WorkerEnd) -> float | None:
        """Seconds after which an ended task is started again; None: it is not."""
        if not self._may_return(placement, end):
            return None
        lived_s = self._clock() - self._started.get(end.rank, self._clock())
        return self._restarts.delay_s(end.rank, end.returncode, lived_s, outlived=end.outlived)

    def _may_return(self, placement: WorkerPlacement, end: WorkerEnd) -> bool:
        """Whether a task that has ended could do something still. Nobody returns to a job that ends, or whose chief has
        finished."""
        if not placement.order.returns or self.is_ending or self._is_finished:
            return False
        # Else nobody is left whom it could join.
        return not self._elastic or not placement.order.trains or end.outlived

    @property
    def _is_finished(self) -> bool:
        """Whether the training has come to its end, well or not: that of the chief, whoever that is."""
        if self._elastic:
            return bool(self._unneeded) or any(
                end.returncode == 0 and self._placements[rank].order.trains for rank, end in self._ends.items()
            )
        return 0 in self._ends or self._servers_have_finished

    @property
    def is_ending(self) -> bool:
        """Whether the launcher ends it, for whatever reason."""
        return bool(self._schedule or self._stop_requests or self._ending)

    def _restart(self) -> None:
        """Start those again whose time has come; if the job is ending, they have ended."""
        for rank, (due, end) in list(self._returning.items()):
            if self.is_ending:
                del self._returning[rank]
                self._ends[rank] = replace(end, order=len(self._ends))
            elif self._is_finished:  # only the chief may have left something undone
                del self._returning[rank]
                self._take_end(replace(end, order=len(self._ends), by_launcher=end.by_launcher or rank != 0))
            elif due <= self._clock():
                del self._returning[rank]
                if event := self._placements[rank].host.restart(rank):
                    self._take(event)

    def _act(self) -> None:
        while self._stop_requests:
            number, now = self._stop_requests.popleft(), self._clock()
            self._stops += 1
            if self._stops > 1 and number == signal.SIGINT:
                self._impatient = True
                self._schedule = ((now, ShutdownStep.KILL), (now + GIVE_UP_S, ShutdownStep.GIVE_UP))
            elif not self._schedule:  # else a failure came first and all are being ended already
                self._stopped_by = number
                self._schedule = after_signal(now, number)
        if self._evaluates_until is not None and not self._schedule and self._evaluates_until <= self._clock():
            self._schedule = after_overdue_evaluation(self._clock())
            late = [p.task for rank, p in self._placements.items() if rank not in self._ends]
            self._observer.overdue(late, self._last_grace_s)
        for rank in [rank for rank, due in self._leaving.items() if due <= self._clock()]:
            del self._leaving[rank]
            self._placements[rank].host.signal(rank, signal.SIGKILL)
        for rank in [rank for rank, due in self._killed.items() if due <= self._clock()]:
            self._take(Exited(rank, -signal.SIGKILL, CrashReported()))
        while self._schedule and self._schedule[0][0] <= self._clock():
            step = self._schedule[0][1]
            self._schedule = self._schedule[1:]
            for placement in self._running:
                rank, host = placement.order.rank, placement.host
                match step:
                    case ShutdownStep.DUMP_STACKS:
                        if self._stopped_by is None:
                            self._hung.add(rank)
                        host.dump_stacks(rank)
                    case ShutdownStep.INTERRUPT:
                        host.signal(rank, signal.SIGINT)
                    case ShutdownStep.TERMINATE:
                        host.signal(rank, signal.SIGTERM)
                    case ShutdownStep.KILL:
                        host.signal(rank, signal.SIGKILL)
                    case ShutdownStep.GIVE_UP:
                        self._take(Exited(rank, -signal.SIGKILL, CrashReported()))
            if step is not ShutdownStep.DUMP_STACKS:
                self._ending = True
            if step is ShutdownStep.TERMINATE:
                for host in self._hosts:
                    for event in host.events():  # whether some take a checkpoint first
                        self._take(event)


def _is_echo(end: WorkerEnd, before: int) -> bool:
    """Whether a task ended because the job did, which was clear when so many others had ended."""
    error = end.words.error
    not_own = (*CONSEQUENCES, RendezvousError.exit_code, EvictedError.exit_code, PreemptedError.exit_code)
    own = error is not None and not error.interrupted and error.code not in not_own
    return (end.by_launcher or end.order >= before) and not own
