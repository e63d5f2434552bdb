"""Which workers a server counts on, and what waits for the chief end with.

The condition `changed` of a server's membership is the one lock of its schedule: it protects the membership itself, the
`FitSchedule`, the rebuild and the chief's announcements. It is reentrant. Lock order: `ShardGroup`'s lock, then
`VariableStore`'s, then this one; a thread that holds this lock acquires neither of the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from phalanx.errors import CollectiveTimeoutError, PeerLostError, PhalanxError, RendezvousError
from phalanx.parameter_server.server.connected_workers import ConnectedWorkers
from phalanx.parameter_server.server_protocol import CHIEF, Worker

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Longest time between two looks at the clock; every change wakes the waiting threads at once."""


class MembershipObserver(Protocol):
    """Is notified of changes with the lock held."""

    def worker_joined(self, worker: Worker) -> None: ...

    def worker_left(self, worker: Worker) -> None: ...


class WorkerMembership:
    """Used by one thread for each worker.

    Args:
        names: the workers' names, by number.
        start_s: seconds to wait for tasks that are still starting.
        workers: which workers are connected.
        clock: current time in seconds.

    Attributes:
        changed: the schedule's lock; notified at every change.
        all_required: losing any worker ends the training (`UpdateRules.all_required`).
        has_chief_left: the chief has finished; waiting for it fails.
        chief_heard_at: when the chief last reported that it is still working, by `clock`.
    """

    def __init__(self, names: tuple[str, ...], start_s: float, workers: ConnectedWorkers, clock: Callable[[], float]):
        self.names = names
        self.start_s = start_s
        self.workers = workers
        self.clock = clock
        self.changed = threading.Condition()
        self.all_required = False
        self.has_chief_left = False
        self.chief_heard_at = 0.0
        self._failure: Callable[[], PhalanxError] | None = None  # what has ended the training for all
        self._observers: list[MembershipObserver] = []

    def add_observer(self, observer: MembershipObserver) -> None:
        self._observers.append(observer)

    def attach(self, worker: Worker, link: str) -> None:
        """A worker is connected by the link of this name (`link_name`), which replaces any earlier one."""
        with self.changed:
            self._leave(worker)
            self.workers.connect(worker, link)
            for observer in self._observers:
                observer.worker_joined(worker)
            self.changed.notify_all()

    def detach(self, worker: Worker, link: str, *, goodbye: bool = False, why: str = "") -> None:
        """A worker is gone. Without a `goodbye` it is lost; `why` is then a sentence, or empty."""
        with self.changed:
            if self.workers.has_link(worker, link):
                self._leave(worker)
                if not goodbye:
                    self.workers.expect_return(worker, why)
                    self._fail(lambda: self.workers.lost(worker, "training"))
                self.changed.notify_all()

    def evict(self, worker: Worker) -> None:
        """Continue without a worker that makes no progress; what its process still sends is refused."""
        with self.changed:
            if self.is_present(worker):
                if self.all_required:
                    self._fail(lambda: busy_error(f"{self.names[worker]} did not make its part of a step"))
                else:
                    logger.warning("%s makes no progress: training continues without it.", self.names[worker])
            self.workers.evict(worker)
            self._leave(worker)
            self.changed.notify_all()

    def _leave(self, worker: Worker) -> None:
        self.workers.disconnect(worker)
        for observer in self._observers:
            observer.worker_left(worker)

    def forget_evictions(self) -> None:
        """This server did not lead: the workers that it missed were connected to the other one."""
        with self.changed:
            self.workers.forget_evictions()

    def is_present(self, worker: Worker) -> bool:
        """Whether a worker is connected, or expected to reconnect soon."""
        return self.workers.is_present(worker)

    def is_evicted(self, link: str) -> bool:
        """Whether the process of this link is evicted."""
        return self.workers.is_evicted(link)

    def lost(self, worker: Worker, during: str) -> PeerLostError:
        """The error that names a worker that is no longer connected."""
        return self.workers.lost(worker, during)

    def _fail(self, failure: Callable[[], PhalanxError]) -> None:
        if self.all_required and self._failure is None:
            self._failure = failure

    def check(self) -> None:
        """Raise the error that has ended the training for all: a required worker was lost."""
        if self._failure is not None:
            raise self._failure()

    # The chief.

    def chief_left(self) -> None:
        """The chief has finished."""
        with self.changed:
            self.has_chief_left = True
            self.changed.notify_all()

    def chief_is_alive(self) -> None:
        """The chief is still working: waits for it are extended."""
        self.chief_heard_at = self.clock()

    def wait_for_all(self) -> None:
        """Wait, with the lock held, until every worker has connected once.

        Raises: PeerLostError if a required one is lost again; as for `wait_for_chief`.
        """
        until = self.clock() + self.start_s
        while self.workers.never_connected():
            self.wait_for_chief(until, lambda: f"{self.workers.never_connected()} did not call `fit`")
        absent = self.workers.seen - self.workers.connected
        if absent and self.all_required:
            raise self.lost(min(absent), "the start of `fit`")

    def wait_for_chief(self, until: float, reason: Callable[[], str]) -> None:
        """Wait for a change, with the lock held.

        Args:
            until: deadline, by `clock`.
            reason: says what is still missing at the deadline, if the chief is connected.

        Raises:
            PeerLostError: the chief has left or was lost.
            RendezvousError: the chief has never connected.
            CollectiveTimeoutError: the deadline has passed.
        """
        if self.has_chief_left:
            raise self.lost(CHIEF, "fit")
        remaining = until - self.clock()
        if remaining <= 0:
            if CHIEF not in self.workers.seen:
                raise RendezvousError(
                    f"{self.names[CHIEF]} did not join the job in time. Is it started, with the same cluster?"
                )
            if CHIEF not in self.workers.connected:
                raise self.lost(CHIEF, "fit; it did not return within the time set")
            raise busy_error(reason())
        self.changed.wait(min(remaining, POLL_S))


def busy_error(reason: str) -> CollectiveTimeoutError:
    """The error for a connected worker that does not respond; `reason` is the beginning of its message."""
    return CollectiveTimeoutError(
        f"{reason} in time (PHALANX_TIMEOUT). It is connected, so it is busy, stopped or waiting for something else."
    )
