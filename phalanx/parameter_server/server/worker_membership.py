"""The workers that a server counts on, and waits that end with the chief.

The condition `changed` of a server's membership is the only lock of its schedule. It protects the table of workers, the
`FitSchedule`, the rebuild and the chief's broadcasts, and is reentrant. Lock order: `ShardGroup`'s lock, then
`VariableStore`'s, then this one; a thread that holds this lock acquires neither of the others. Before all of them come
`GroupLeadership._applying` and `GroupRecovery._lock`, which no thread holds at the same time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from phalanx.errors import CollectiveTimeoutError, RendezvousError
from phalanx.parameter_server.server.worker_table import WorkerTable
from phalanx.parameter_server.server_protocol import CHIEF_WORKER, Worker
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Longest time between two checks of the clock, in seconds; every change wakes the waiting threads immediately."""


class MembershipObserver(Protocol):
    """Receives notifications of changes, with the lock held."""

    def worker_joined(self, worker: Worker) -> None: ...

    def worker_left(self, worker: Worker) -> None: ...


class WorkerMembership:
    """The workers of a server. Each worker's thread uses it.

    Args:
        names: The workers' names, by number.
        start_timeout_s: Seconds to wait for tasks that are still starting.
        table: The workers and their links.
        clock: Returns the current time in seconds.

    Attributes:
        changed: Lock of the schedule; notified at every change.
        chief_heard_at: Time when the chief last reported that it is still working, by `clock`.
    """

    def __init__(self, names: tuple[str, ...], start_timeout_s: float, table: WorkerTable, clock: Callable[[], float]):
        self.names = names
        self.start_timeout_s = start_timeout_s
        self.table = table
        self.clock = clock
        self.changed = threading.Condition()
        self.chief_heard_at = 0.0
        self._observers: list[MembershipObserver] = []

    def add_observer(self, observer: MembershipObserver) -> None:
        self._observers.append(observer)

    def attach(self, worker: Worker, name: str, link: Link | None = None) -> tuple[str, Link | None] | None:
        """Connect a worker by the link of this name (`link_name`). Returns the link that it replaces."""
        with self.changed:
            # Its tickets return to the schedule: a new process has none. If it only reconnects, `Rejoin` restores them.
            self._disconnect(worker)
            former = self.table.connect(worker, name, link)
            for observer in self._observers if worker in self.table.connected else ():
                observer.worker_joined(worker)
            self.changed.notify_all()
            return former

    def record_leave(self, worker: Worker, failure: str = "") -> None:
        """Record that a worker has finished, or failed with this error. Waits for the chief end with it."""
        with self.changed:
            self.table.leave(worker, failure)
            self.changed.notify_all()

    def detach(self, worker: Worker, name: str, why: str = "") -> bool:
        """Remove a link that has ended. Returns whether it was its worker's current link.

        A worker that has not left the job is lost; `why` is then a sentence, or empty.
        """
        with self.changed:
            # Evicted workers are present and do not count: their end is no loss. Checked before the link is removed.
            counted = self.table.has_link(worker, name)
            is_present = self.table.remove(worker, name)
            if counted:
                self._disconnect(worker)
                if worker not in self.table.left:
                    self.table.expect_return(worker, why)
                self.changed.notify_all()
            return is_present

    def evict(self, worker: Worker) -> None:
        """Continue without a worker that makes no progress; what its process still sends is refused."""
        with self.changed:
            if self.table.is_present(worker):
                logger.warning("%s makes no progress: training continues without it.", self.names[worker])
            self.table.evict(worker)
            self._disconnect(worker)
            self.changed.notify_all()

    def _disconnect(self, worker: Worker) -> None:
        self.table.connected.discard(worker)
        for observer in self._observers:
            observer.worker_left(worker)

    @property
    def has_chief_left(self) -> bool:
        """Whether the chief has finished; waiting for it fails."""
        return CHIEF_WORKER in self.table.left

    # The chief.

    def record_chief_heartbeat(self) -> None:
        """Record that the chief is still working, which extends waits for it."""
        self.chief_heard_at = self.clock()

    def wait_for_all(self) -> None:
        """Wait, with the lock held, until every worker has connected once.

        Raises: see `wait_for_chief`.
        """
        until = self.clock() + self.start_timeout_s
        while self.table.never_connected():
            self.wait_for_chief(until, lambda: f"{self.table.never_connected()} did not call `fit`")

    def wait_for_chief(self, until: float, reason: Callable[[], str]) -> None:
        """Wait for a change, with the lock held.

        Args:
            until: Deadline, by `clock`.
            reason: Returns what is still missing at the deadline, if the chief is connected.

        Raises:
            PeerLostError: the chief has left or was lost.
            RendezvousError: the chief has never connected.
            CollectiveTimeoutError: the deadline has passed.
        """
        if self.has_chief_left:
            raise self.table.lost_error(CHIEF_WORKER, "fit")
        remaining = until - self.clock()
        if remaining <= 0:
            if CHIEF_WORKER not in self.table.seen:
                raise RendezvousError(
                    f"{self.names[CHIEF_WORKER]} did not join the job in time. Is it started, with the same cluster?"
                )
            if CHIEF_WORKER not in self.table.connected:
                raise self.table.lost_error(CHIEF_WORKER, "fit; it did not return within the time set")
            raise CollectiveTimeoutError(
                f"{reason()} in time (PHALANX_TIMEOUT). It is connected, so it is busy, stopped or waiting for "
                f"something else."
            )
        self.changed.wait(min(remaining, POLL_S))
