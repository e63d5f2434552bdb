"""Assigns functions to workers: pure decisions, without a process, thread or clock.

    waiting --(a worker is free)--> sent --(it answers)--> done
       ^                             |
       +-----(its worker is lost)----+
    waiting, sent --(a function failed)--> cancelled, failed

A function is done when the process that it was sent to has answered. Later answers (from a worker that was considered
dead) do not count. When a function fails, the waiting ones are cancelled and the running ones are awaited. Then the
error is raised once, and functions can be added again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

Worker = int
FunctionId = int

MAX_FUNCTIONS_PER_WORKER = 2
"""Number of functions that a worker has at a time: one running and one queued there, so that the worker never idles."""
MAX_LOST_WORKERS = 5
"""Number of lost workers after which the function that they ran is assumed to be the cause."""


@dataclass
class _Function:
    """An unfinished function.

    Attributes:
        needs: Functions whose results are its arguments.
        losses: Number of workers that were lost while they ran it.
    """

    needs: frozenset[FunctionId]
    losses: int = 0


@dataclass
class _ConnectedWorker:
    """A connected worker.

    Attributes:
        incarnation: Incarnation of its process.
        sent: Functions that it has and has not answered; it runs them in this order.
    """

    incarnation: str
    sent: list[FunctionId] = field(default_factory=list)


class FunctionAssignment:
    """Decides which function each worker runs. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._unfinished: dict[FunctionId, _Function] = {}
        self._waiting: list[FunctionId] = []  # functions that no worker has, in the order in which they are to run
        self._workers: dict[Worker, _ConnectedWorker] = {}
        self.is_failing = False  # a function has failed, and the others are being cancelled or awaited

    # Actions of the program.

    def add(self, function: FunctionId, needs: Iterable[FunctionId] = ()) -> None:
        """Add a function, to be run after those whose results it needs. Numbers grow, and are never reused."""
        assert not self.is_failing, "the error is told first"
        self._unfinished[function] = _Function(frozenset(needs))
        self._waiting.append(function)

    @property
    def unfinished(self) -> int:
        """Number of functions that are waiting or running."""
        return len(self._unfinished)

    @property
    def running(self) -> int:
        """Number of functions that have been sent and not answered."""
        return sum(len(worker.sent) for worker in self._workers.values())

    def clear_failure(self) -> None:
        """Accept new functions, after the error has been raised."""
        assert not self._unfinished, "nothing runs any more when an error is told"
        self.is_failing = False

    # Events of workers.

    @property
    def workers(self) -> frozenset[Worker]:
        return frozenset(self._workers)

    def add_worker(self, worker: Worker, incarnation: str) -> list[FunctionId]:
        """Add a connected worker. If it replaces a connection, returns what `remove_worker` returns for that one."""
        former = self._workers.get(worker)
        over = self.remove_worker(worker, former.incarnation) if former is not None else []
        self._workers[worker] = _ConnectedWorker(incarnation)
        return over

    def remove_worker(self, worker: Worker, incarnation: str) -> list[FunctionId]:
        """Remove a lost worker: its functions run elsewhere, before the waiting ones.

        Returns: the functions that do not run again: after a failure all, else those that have cost too many workers.
        """
        connected = self._workers.get(worker)
        if connected is None or connected.incarnation != incarnation:
            return []
        del self._workers[worker]
        if connected.sent:
            # Workers run their functions in order, so only the first can have cost this one.
            self._unfinished[connected.sent[0]].losses += 1
        given_up = [f for f in connected.sent if self.is_failing or self._unfinished[f].losses >= MAX_LOST_WORKERS]
        self._waiting[:0] = [function for function in connected.sent if function not in given_up]
        self._waiting.sort()  # by number: the order in which the program scheduled them
        for function in given_up:
            del self._unfinished[function]
        return given_up

    def assign_next(self, worker: Worker, incarnation: str) -> FunctionId | None:
        """The function to send to a worker now, which it then has; None if there is none, or it has enough."""
        connected = self._workers.get(worker)
        if connected is None or connected.incarnation != incarnation or len(connected.sent) >= MAX_FUNCTIONS_PER_WORKER:
            return None
        # Functions that it could only queue are left to idle workers.
        idle = sum(not other.sent for other in self._workers.values()) if connected.sent else 0
        # A function waits for its arguments here, not at a worker, where it would block those behind it.
        can_run = (f for f in self._waiting if self._unfinished.keys().isdisjoint(self._unfinished[f].needs))
        ready = list(islice(can_run, idle + 1))
        if len(ready) <= idle:
            return None
        self._waiting.remove(ready[0])
        connected.sent.append(ready[0])
        return ready[0]

    def finish(self, worker: Worker, incarnation: str, function: FunctionId) -> bool:
        """Record a worker's answer. Returns whether it counts."""
        connected = self._workers.get(worker)
        if connected is None or connected.incarnation != incarnation or function not in connected.sent:
            return False
        connected.sent.remove(function)
        del self._unfinished[function]
        return True

    def fail(self) -> list[FunctionId]:
        """Record that a function has failed. Returns the waiting functions, which are now cancelled."""
        # So that `remove_worker` gives up a lost worker's functions instead of running them again.
        self.is_failing = True
        cancelled, self._waiting = self._waiting, []
        for function in cancelled:
            del self._unfinished[function]
        return cancelled
