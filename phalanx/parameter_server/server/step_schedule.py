"""The schedule of steps, which the first server, the *head*, decides for all workers.

A worker requests a ticket for each step: the right, and the duty, to train on one batch of the epoch. Tickets are
issued in order, to the first worker that requests one, so a fast worker takes more steps than a slow one, and the
ticket of a lost worker goes to another. In synchronous training all connected workers take each step together, and hold
tickets for parts of one batch.

The chief opens and ends the epochs; the other workers wait for it.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from phalanx.errors import EvictedError
from phalanx.parameter_server import server_messages as messages
from phalanx.parameter_server.server.counted_steps import CountedSteps
from phalanx.parameter_server.server.fit_schedule import FitPhase, FitSchedule, SampleOrder
from phalanx.parameter_server.server.worker_membership import POLL_S, WorkerMembership
from phalanx.parameter_server.server_messages import EpochOver, FitOver, GroupState, Ticket
from phalanx.parameter_server.server_protocol import CHIEF_WORKER, Worker

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

_UNDECLARED = messages.UpdateRules(
    synchronous=False, replicas_to_aggregate=0, staleness=-1, refuse_nan=True, timeout_s=0.0
)


class StepSchedule:
    """Adds waiting and locking to a `FitSchedule`. Each worker's thread uses it; every call names its worker.

    Args:
        members: The workers; its lock `changed` protects the schedule too.

    Attributes:
        fit: The latest declared `fit`; its number is -1 before the first.
        global_step: Number of updates that the job has made.
        last_progress: Time when a step was last completed, or the epoch opened, by `clock`.
        counted: Steps that are included in `global_step`.
    """

    def __init__(self, members: WorkerMembership):
        self.members = members
        self.clock = members.clock
        self.changed = members.changed
        self.fit = FitSchedule(-1, 0, _UNDECLARED, ())
        self.global_step = 0
        self.counted = CountedSteps()
        self._declared_by = ""  # incarnation of the chief that declared the `fit`; "" after a change of leader
        self.last_progress = 0.0
        members.add_observer(self)

    # The life of a `fit`.

    def begin_fit(self, rules: messages.UpdateRules, fit: int, step: int = 0, era: int | None = None) -> None:
        """Begin a `fit` that the chief declares, or the same one again after a restart.

        Args:
            rules: Rules by which gradients become updates.
            fit: Number of the `fit` call.
            step: The global step of the chief's values.
            era: Era of the `fit`; None: the next one.
        """
        with self.changed:
            chief = self.members.table.incarnation(CHIEF_WORKER)
            # A restarted chief continues from what it has restored, and so does the count.
            went_back = bool(self._declared_by and chief) and chief != self._declared_by
            self.global_step = step if went_back else max(self.global_step, step)
            self._declared_by = chief
            self.counted = CountedSteps()
            era = self.fit.era + 1 if era is None else era
            self.fit = FitSchedule(fit, era, rules, self.members.table.connected, self.fit.last_serial)
            self.changed.notify_all()

    def resume_fit(self, state: GroupState) -> None:
        """Continue a `fit`, or a finished one, that another process declared or led."""
        with self.changed:
            self.begin_fit(state.declared.rules, state.declared.fit, era=state.era)
            self.global_step = state.step
            for serial, *_ in state.completed:
                self.fit.skip_serial(serial)
            self.members.table.seen.update(range(len(self.members.names)))  # all were connected at its start
            if state.ended:
                self.end_fit(state.declared.fit)

    def end_fit(self, fit: int) -> None:
        """End this `fit`, as the chief requests."""
        with self.changed:
            if fit == self.fit.number:
                self.fit.end()
            self.changed.notify_all()

    def worker_joined(self, worker: Worker) -> None:
        """See `MembershipObserver`."""
        self.fit.staleness.add_worker(worker)

    def worker_left(self, worker: Worker) -> None:
        """See `MembershipObserver`."""
        if worker == CHIEF_WORKER:
            self.fit.is_on_hold = False
        self.fit.release(worker, self.members.table.connected)

    # Epochs.

    def open_epoch(self, fit: int, number: int, steps: int | None, order: Array | None) -> None:
        """Open an epoch, as the chief requests. In synchronous training, wait for all workers before the first one."""
        with self.changed:
            assert self.fit.number >= 0, "the chief declares a `fit` before it opens an epoch"
            if self.fit.epoch is not None and self.fit.is_open(fit, number):
                # A repeated request, after the chief's link was lost.
                if self.fit.epoch.steps is None:
                    self.fit.epoch.steps = steps
            else:
                if self.fit.rules.synchronous and self.fit.epoch is None:
                    self.members.wait_for_all()
                self.fit.open_epoch(number, steps)
                self.last_progress = self.clock()
            if order is not None:
                self.fit.order = SampleOrder(number, order)
            self.changed.notify_all()

    def wait_for_order(self, fit: int, number: int, era: int, timeout_s: float) -> Array | EpochOver | FitOver:
        """The sample order of the pass that began with this epoch; waits until the chief has sent it, or will not."""
        with self.changed:
            requested_at = self.clock()
            while True:
                if (over := self.fit.superseded_response(fit, era)) is not None:
                    return over
                if fit == self.fit.number and self.fit.order.epoch >= number:
                    return self.fit.order.indices
                self._wait_for_epoch(number, max(requested_at, self.members.chief_heard_at), timeout_s)

    def _wait_for_epoch(self, number: int, since: float, timeout_s: float) -> None:
        """Wait for a change; the chief may take longer before its first epoch."""
        members = self.members
        limit_s = members.start_timeout_s if self.fit.phase is FitPhase.DECLARED else timeout_s
        members.wait_for_chief(
            since + limit_s, lambda: f"{members.names[CHIEF_WORKER]} did not begin epoch {number + 1} of `fit`"
        )

    def end_epoch(self, fit: int, number: int) -> int:
        """Issue no more tickets for this epoch. Returns its number of steps. Repeating the call changes nothing."""
        with self.changed:
            if self.fit.epoch is not None and self.fit.is_open(fit, number):
                self.fit.epoch.close()
                self.changed.notify_all()
            return self.fit.steps_issued

    # Steps.

    def next_ticket(
        self, worker: Worker, link: str, fit: int, number: int, era: int, timeout_s: float
    ) -> Ticket | EpochOver | FitOver:
        """The worker's next ticket in this epoch; waits until there is one or no more will follow.

        Args:
            worker: The worker that requests it.
            link: Name of the worker's link; a replaced link receives no ticket.
            fit: Number of the `fit` call.
            number: Number of the epoch.
            era: Era of the `fit`, as the worker knows it.
            timeout_s: Seconds after which a worker that blocks this one is evicted.

        Raises:
            EvictedError: the worker was evicted, or already has another link.
            PeerLostError: the chief was lost.
            CollectiveTimeoutError: the chief does not open the epoch.
        """
        with self.changed:
            # `requested_at` moves while steps are taken, so that the chief is not late; `since` stays, for the workers
            # that hold the last tickets of the epoch.
            requested_at = since = self.clock()
            blocked_since: float | None = None
            while True:
                if not self.members.table.has_link(worker, link):
                    name = self.members.names[worker]
                    raise EvictedError(f"{name} was evicted, or started again in another process.")
                if (over := self.fit.superseded_response(fit, era)) is not None:
                    return over
                epoch = self.fit.epoch
                if epoch is not None and fit == self.fit.number and epoch.number >= number:
                    if epoch.number > number:
                        return EpochOver(self.fit.steps_by_epoch.get(number, 0))
                    ticket = self.fit.issue(worker, self.members.table.connected)
                    if ticket is not None:
                        self.changed.notify_all()
                        return ticket
                    requested_at = self.clock()  # the epoch is being trained, so the chief is not late
                    slowest = None if epoch.is_exhausted else self.fit.blocked_by(worker)
                    blocked_since = None if slowest is None else blocked_since or self.clock()
                    if self._evict_late(since, slowest, blocked_since, timeout_s):
                        continue
                heard_at = max(requested_at, self.last_progress, self.members.chief_heard_at)
                self._wait_for_epoch(number, heard_at, timeout_s)

    def _evict_late(self, since: float, slowest: Worker | None, blocked_since: float | None, timeout_s: float) -> bool:
        """Evict the workers that have blocked another one for too long. Returns whether there were any."""
        epoch, now = self.fit.epoch, self.clock()
        late: set[Worker] = set()
        if epoch is not None and epoch.is_exhausted and now - max(since, self.last_progress) > timeout_s:
            late = self.fit.tickets.holders()
        elif slowest is not None and blocked_since is not None and now - blocked_since > timeout_s:
            late = {slowest}
        for worker in late:
            self.members.evict(worker)
        return bool(late)

    def try_next_ticket(self, worker: Worker, link: str, fit: int, number: int, era: int) -> Ticket | None:
        """A ticket, if one is available now."""
        with self.changed:
            if not self.fit.is_open(fit, number) or era != self.fit.era:
                return None
            if not self.members.table.has_link(worker, link):
                return None
            ticket = self.fit.issue(worker, self.members.table.connected)
            return ticket if isinstance(ticket, Ticket) else None

    def complete_step(self, ticket: Ticket, *, is_applied: bool = True) -> None:
        """Complete the step of this ticket: it was applied, or refused because it was not finite."""
        with self.changed:
            self.global_step += is_applied and not self.counted.includes(ticket)
            if is_applied and not self.fit.rules.synchronous:
                self.counted.add(ticket)
            self.last_progress = self.clock()
            self.fit.complete(ticket)
            self.changed.notify_all()

    def settle_counted_step(self, ticket: Ticket) -> None:
        """End the step of this ticket, which was applied and counted before."""
        with self.changed:
            self.fit.tickets.settle(ticket.serial)
            self.changed.notify_all()

    def report_no_batch(self, ticket: Ticket, *, is_end_of_data: bool) -> None:
        """See `FitSchedule.report_no_batch`."""
        with self.changed:
            self.fit.report_no_batch(ticket, is_end_of_data=is_end_of_data)
            self.changed.notify_all()

    def hold_steps(self, timeout_s: float) -> None:
        """For the chief: issue no more tickets, and wait until the steps of all other workers are applied."""
        with self.changed:
            self.fit.is_on_hold = True
            until = self.clock() + timeout_s
            # The hold ends early if the chief, which requested it, is lost.
            while self.fit.is_on_hold and (late := self.fit.tickets.holders() - {CHIEF_WORKER}):
                if self.clock() > until:
                    for worker in late:
                        self.members.evict(worker)
                else:
                    self.changed.wait(POLL_S)

    def resume_steps(self) -> None:
        """End `hold_steps`."""
        with self.changed:
            self.fit.is_on_hold = False
            self.changed.notify_all()

    # Reports.

    def add_report(self, worker: Worker, report: messages.EpochReport, arrays: list[Array]) -> None:
        """Add a worker's counts for an epoch; ignored if the epoch was collected without it."""
        with self.changed:
            if self.fit.is_open(report.fit, report.epoch):
                self.fit.reports.add(worker, report, arrays)
                self.changed.notify_all()

    def collect_reports(self, timeout_s: float) -> list[Array]:
        """The merged reports of the open epoch; waits for all workers that took part and are present."""
        with self.changed:
            until = self.clock() + timeout_s
            while late := [worker for worker in self.fit.reports.missing() if self.members.table.is_present(worker)]:
                if self.clock() > until:
                    for worker in late:
                        self.members.evict(worker)
                else:
                    self.changed.wait(POLL_S)
            return self.fit.reports.merged()[0]
