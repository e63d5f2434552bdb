"""The steps of one `fit`: its open epoch, its outstanding tickets, and its workers' reports.

Pure: `StepSchedule` calls it with its lock held and does all waiting.

A `fit` passes through these phases:

    DECLARED            -> RUNNING      its first epoch is opened
    DECLARED, RUNNING   -> REBUILDING   another process now leads, and waits for the workers' positions
    REBUILDING          -> RUNNING      ... or DECLARED, if the chief has not opened its epoch
    any                 -> ENDED        the chief ends it
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

from phalanx.parameter_server.server.bounded_staleness import BoundedStaleness
from phalanx.parameter_server.server.epoch_batches import EpochBatches, LostBatches
from phalanx.parameter_server.server.epoch_reports import EpochReports
from phalanx.parameter_server.server.outstanding_tickets import OutstandingTickets
from phalanx.parameter_server.server_messages import EpochOver, FitOver, Ticket, UpdateRules
from phalanx.parameter_server.server_protocol import Worker

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


class FitPhase(Enum):
    """Phase of a `fit`.

    DECLARED: no epoch is open yet. RUNNING: an epoch was opened. REBUILDING: this process has taken the lead during the
    `fit` and waits for the workers to report their positions. ENDED: the chief has ended it.
    """

    DECLARED = auto()
    RUNNING = auto()
    REBUILDING = auto()
    ENDED = auto()


class SampleOrder(NamedTuple):
    """The order of the samples in one pass over the data.

    Attributes:
        epoch: The first epoch of the pass; -1: there is none.
        indices: Numbers of the samples, an integer array.
    """

    epoch: int = -1
    indices: Array = np.zeros(0, np.int64)


class FitSchedule:
    """Decides which worker takes which step of one `fit`.

    Args:
        number: Number of the `fit` call.
        era: Era of the `fit`, as the chief declared it.
        rules: Rules by which gradients become updates.
        workers: The connected workers.
        last_serial: Serial of the job's newest ticket. Later tickets have other serials, because a push is recognized
            as a repetition by its ticket's serial.

    Attributes:
        newest_serial: Serial of the newest applied step; -1 before the first.
        steps_by_epoch: Number of steps of each earlier epoch.
        lost: Issued batches that no worker is known to have trained on.
        is_on_hold: Whether the chief pauses the training.
        stop_requested: Whether a worker has requested that the chief ends the `fit`.
    """

    def __init__(self, number: int, era: int, rules: UpdateRules, workers: Collection[Worker], last_serial: int = 0):
        self.number = number
        self.era = era
        self.rules = rules
        self.phase = FitPhase.DECLARED
        self.last_serial = last_serial
        self.epoch: EpochBatches | None = None
        self.tickets = OutstandingTickets()
        self.staleness = BoundedStaleness(rules.staleness, workers)
        self.reports = EpochReports()
        self.order = SampleOrder()
        self.newest_serial = -1
        self.steps_by_epoch: dict[int, int] = {}
        self.lost = LostBatches()
        self.is_on_hold = False
        self.stop_requested = False

    # Epochs.

    def has_ended(self, fit: int) -> bool:
        """Whether the chief has ended the `fit` of this number."""
        return fit < self.number or (fit == self.number and self.phase is FitPhase.ENDED)

    def is_open(self, fit: int, epoch: int) -> bool:
        """Whether this epoch is the open one."""
        return self.epoch is not None and (self.number, self.epoch.number) == (fit, epoch)

    def open_epoch(self, number: int, steps: int | None) -> None:
        self._record_steps()  # before the epoch is replaced: late workers still ask for its length
        self.reports = EpochReports()
        self.epoch = EpochBatches(number, steps)
        self.phase = FitPhase.RUNNING
        self.tickets = OutstandingTickets()

    def end(self) -> None:
        """End the `fit`, as the chief requests."""
        self._record_steps()
        self.epoch = None
        self.phase = FitPhase.ENDED

    def _record_steps(self) -> None:
        if self.epoch is not None:
            self.steps_by_epoch[self.epoch.number] = self.epoch.count

    @property
    def steps_issued(self) -> int:
        """Number of steps issued in the open epoch; 0 if none is open."""
        return 0 if self.epoch is None else self.epoch.count

    def superseded_response(self, fit: int, era: int) -> EpochOver | FitOver | None:
        """The response to a worker in a `fit` that the chief has ended, or has declared again in another era."""
        if self.has_ended(fit):
            return FitOver()
        if self.epoch is not None and fit == self.number and era != self.era:
            return EpochOver(resume_epoch=self.epoch.number, era=self.era)
        return None

    # Steps.

    def issue(self, worker: Worker, connected: Collection[Worker]) -> Ticket | EpochOver | None:
        """A ticket of the open epoch for this worker, or `EpochOver`; None: not now."""
        epoch = self.epoch
        assert epoch is not None, "an epoch is open"
        if self.rules.synchronous:
            return self._issue_jointly(worker, epoch, connected)
        # Even if it gets no ticket: it leaves the epoch with a report. Joint steps merge metrics as they are taken.
        self.reports.participants.add(worker)
        if self.is_on_hold:
            return None
        if epoch.is_exhausted:
            # A ticket that a worker still holds may be returned.
            return None if self.tickets.by_serial else EpochOver(epoch.count)
        if self.blocked_by(worker) is not None:
            return None
        ticket = self._next_ticket(worker, epoch, (worker,))
        assert ticket is not None, "the epoch is not exhausted"
        self.tickets.add([ticket])
        return ticket

    def _issue_jointly(
        self, worker: Worker, epoch: EpochBatches, connected: Collection[Worker]
    ) -> Ticket | EpochOver | None:
        # One joint step at a time: a member that has finished it waits until the merge has settled its ticket.
        if self.tickets.joint_ticket is None:
            if self.is_on_hold:
                return None
            ticket = self._next_ticket(worker, epoch, tuple(sorted(connected)))
            if ticket is None:
                return EpochOver(epoch.count, newest_serial=self.newest_serial)
            self.tickets.begin_joint_step(ticket)
        return self.tickets.issue_joint_ticket(worker)

    def _next_ticket(self, worker: Worker, epoch: EpochBatches, members: tuple[Worker, ...]) -> Ticket | None:
        batch = epoch.draw()
        if batch is None:
            return None
        self.last_serial += 1
        return Ticket(self.number, epoch.number, batch, members, worker, self.last_serial, self.era)

    def skip_serial(self, serial: int) -> None:
        """Skip serials up to this one, issued by another process: a second step of one looks like a repeated push."""
        self.last_serial = max(self.last_serial, serial)

    def blocked_by(self, worker: Worker) -> Worker | None:
        """The slowest worker, if bounded staleness prevents this one from taking a step."""
        if self.rules.staleness < 0:
            return None
        return self.staleness.blocked_by(worker, self.tickets.count_of(worker))

    def complete(self, ticket: Ticket) -> None:
        """Complete the step of this ticket."""
        self.newest_serial = max(self.newest_serial, ticket.serial)
        if self.is_open(ticket.fit, ticket.epoch):
            self.reports.completed += 1
        self.staleness.count_step(ticket.member)
        self.tickets.settle(ticket.serial)

    def report_no_batch(self, ticket: Ticket, *, is_end_of_data: bool) -> None:
        """Settle a ticket without a batch: the data ends before it, or the worker's stream is already past it."""
        self.tickets.settle(ticket.serial)
        if self.epoch is not None and self.is_open(ticket.fit, ticket.epoch):
            if is_end_of_data:
                self.epoch.truncate(ticket.batch)
            else:
                self.lost.count += 1
                logger.warning("Batch %d of epoch %d is lost with its worker.", ticket.batch, ticket.epoch + 1)

    def release(self, worker: Worker, connected: Collection[Worker]) -> None:
        """Return the batches of a lost worker, to be issued again."""
        self.staleness.remove_worker(worker)
        for ticket in self.tickets.release(worker, connected):
            if self.epoch is not None and self.is_open(ticket.fit, ticket.epoch):
                self.epoch.put_back(ticket.batch)

    def restore(self, ticket: Ticket) -> None:
        """Return a ticket to a worker that had only lost its connection and still takes the step."""
        if (
            self.tickets.restore_joint_ticket(ticket)
            or self.epoch is None
            or not self.is_open(ticket.fit, ticket.epoch)
        ):
            return
        # If another worker already has the batch, it is trained on twice: the push of an untracked ticket counts too.
        if self.epoch.reclaim(ticket.batch):
            self.tickets.add([ticket])
