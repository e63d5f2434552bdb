"""Rebuilds a schedule during a `fit`, on a new head, from the positions that workers report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from phalanx.parameter_server.server.epoch_batches import EpochBatches
from phalanx.parameter_server.server.fit_schedule import FitPhase, FitSchedule, SampleOrder
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server_messages import Rejoin
from phalanx.parameter_server.server_protocol import CHIEF_WORKER, Worker

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

REJOIN_TIMEOUT_S = 60.0
"""Seconds that a new leader waits for workers: one in the middle of a long step has not noticed the change yet."""


class WorkerPosition(NamedTuple):
    """A worker's position in the training: its message, and from the chief the sample order, if there is one."""

    message: Rejoin
    order: Array | None


class ScheduleRebuild:
    """Collects the workers' positions and rebuilds the schedule. The schedule's lock protects it."""

    def __init__(self, schedule: StepSchedule):
        self._schedule = schedule
        self._members = schedule.members
        self._since = 0.0  # by the schedule's clock
        self._positions: dict[Worker, WorkerPosition] = {}  # only of workers that are still connected
        self._new_processes: set[Worker] = set()  # workers that have no position to report
        self._members.add_observer(self)

    def worker_joined(self, worker: Worker) -> None:
        """See `MembershipObserver`."""

    def worker_left(self, worker: Worker) -> None:
        """See `MembershipObserver`."""
        self._positions.pop(worker, None)

    def expect_workers(self) -> None:
        """Expect the workers of the process that led before: they are about to connect here, and are not lost."""
        with self._schedule.changed:
            self._members.table.expect_all(REJOIN_TIMEOUT_S)

    def start(self) -> None:
        """Issue no tickets until the workers have reported their positions."""
        with self._schedule.changed:
            self._schedule.fit.phase = FitPhase.REBUILDING
            self._since = self._schedule.clock()
            self._positions.clear()
            self._new_processes.clear()

    def rejoin(self, worker: Worker, message: Rejoin, order: Array | None) -> None:
        """Record the position that a reconnected worker reports."""
        schedule = self._schedule
        with schedule.changed:
            schedule.global_step = max(schedule.global_step, message.step)
            if schedule.fit.phase is FitPhase.REBUILDING:
                self._positions[worker] = WorkerPosition(message, order)
                self._new_processes.discard(worker)
                if len(self._positions) == len(self._members.names):
                    self._finish()
            else:
                skip_serials(schedule.fit, [message])
                for ticket in message.tickets:
                    schedule.fit.restore(ticket)
            schedule.changed.notify_all()

    def wait(self, worker: Worker, timeout_s: float) -> None:
        """Wait until the schedule is rebuilt, before anything else that this worker requests.

        The wait is at most `timeout_s` for the chief, less for the others. New processes have no position to report.
        """
        schedule, members = self._schedule, self._members
        if schedule.fit.phase is not FitPhase.REBUILDING:  # without the lock: nearly every request gets here
            return
        with schedule.changed:
            if schedule.fit.phase is FitPhase.REBUILDING and worker not in self._positions:
                self._new_processes.add(worker)
            while schedule.fit.phase is FitPhase.REBUILDING:
                waited_s = schedule.clock() - self._since
                all_came = len(self._positions.keys() | self._new_processes) == len(members.names)
                if CHIEF_WORKER in self._positions and (all_came or waited_s > min(REJOIN_TIMEOUT_S, timeout_s / 2)):
                    self._finish()
                    schedule.changed.notify_all()
                else:
                    members.wait_for_chief(
                        self._since + timeout_s, lambda: f"{members.names[CHIEF_WORKER]} did not return"
                    )

    def _finish(self) -> None:
        schedule = self._schedule
        here = [m for m, _ in self._positions.values() if m.era == schedule.fit.era]
        if schedule.fit.rules.synchronous:
            schedule.counted.counted_up_to = max((message.finished for message in here), default=-1)
        else:
            tickets = [ticket for message in here for ticket in message.tickets]
            schedule.counted.resume(tickets, [serial for message in here for serial in message.counted_serials])
        if rebuild_fit(schedule.fit, self._positions):
            schedule.last_progress = schedule.clock()  # no worker is late yet
        self._positions.clear()


def skip_serials(fit: FitSchedule, messages: Iterable[Rejoin]) -> None:
    """Skip every serial that one of these workers knows: a step with it would look like a repetition."""
    for message in messages:
        for serial in [message.finished, *(ticket.serial for ticket in message.tickets)]:
            fit.skip_serial(serial)


def rebuild_fit(fit: FitSchedule, positions: Mapping[Worker, WorkerPosition]) -> bool:
    """Continue from the workers' positions. Returns whether an epoch is open."""
    chief, order = positions[CHIEF_WORKER]
    # A worker of another era learns from `FitSchedule.superseded_response` that it must go back; its tickets are void.
    here = [message for message, _ in positions.values() if message.era == fit.era]
    same = [m for m in here if (m.fit, m.epoch) == (chief.fit, chief.epoch)]
    # Including tickets of a worker that has the first ticket of this epoch and has not begun the epoch yet.
    held = [ticket for message in here for ticket in message.tickets]
    tickets = [ticket for ticket in held if (ticket.fit, ticket.epoch) == (chief.fit, chief.epoch)]
    # Not from the workers alone: the one that took the newest steps may be lost with the previous head.
    skip_serials(fit, here)
    fit.phase = FitPhase.DECLARED
    if not chief.is_epoch_opened or chief not in same:  # the chief's next request opens the epoch
        return False
    fit.phase = FitPhase.RUNNING
    fit.epoch = epoch = EpochBatches(chief.epoch, None if chief.steps < 0 else chief.steps)
    # Batches beyond it, which only lost workers knew of, are issued a second time.
    epoch.next_unissued = max([message.batches for message in same] + [ticket.batch + 1 for ticket in tickets])
    fit.order = SampleOrder(chief.order_epoch, np.zeros(0, np.int64) if order is None else order)
    # Workers that are ahead have reported, and will report again.
    fit.reports.participants = {w for w, (m, _) in positions.items() if m in here and m.epoch >= chief.epoch}
    fit.reports.participants |= {ticket.member for ticket in tickets}
    if fit.rules.synchronous:
        if tickets:
            # A worker that has finished the newest step proves that it was applied, so the next one may be issued.
            joint = max(tickets, key=lambda ticket: ticket.serial)
            if all(message.finished < joint.serial for message in here):
                holders = {ticket.member for ticket in tickets if ticket.serial == joint.serial}
                fit.tickets.begin_joint_step(joint, holders)
        return True
    fit.tickets.by_serial.clear()
    fit.tickets.add(tickets)
    known = len(fit.tickets.by_serial) + sum(message.steps_taken for message in same)
    # A worker that is ahead knows that the epoch is over, so no worker held any of its tickets.
    is_any_ahead = any((m.fit, m.epoch) > (chief.fit, chief.epoch) for m in here)
    if not is_any_ahead and (unknown := epoch.next_unissued - known) > 0:
        fit.lost.count += unknown
        logger.warning(
            "Up to %d batches of epoch %d are lost: they were handed out, and no connected worker has them or has "
            "trained on them.",
            unknown,
            chief.epoch + 1,
        )
    return True
