"""Who makes which step: what the first server, the *head*, decides for all workers.

A worker takes a ticket for each step it makes: the right, and the duty, to train on one batch of the epoch. Tickets are
handed out in order, to whoever asks; so a fast worker makes more steps than a slow one, and the ticket of a worker that
died goes to another. In synchronous training all workers present make each step together, and hold tickets
for parts of one batch.

The chief says when an epoch begins, and when there are no more. Everybody else waits for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.errors import CollectiveTimeoutError, EvictedError, PeerLostError, PhalanxError, RendezvousError
from phalanx.parameter_server.server.connected_workers import CHIEF, ConnectedWorkers, Worker
from phalanx.parameter_server.server.epoch_reports import EpochReports
from phalanx.parameter_server.server_messages import (
    EpochOver,
    EpochReport,
    FitOver,
    GroupState,
    Rejoin,
    Ticket,
    UpdateRules,
)

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
POLL_S = 0.5
"""Longest time between two looks at the clock; whatever happens wakes the waiting at once."""
REJOIN_S = 60.0
"""How long a new leader waits for workers: one that is in the middle of a long step has not noticed yet."""


@dataclass
class _Epoch:
    """The epoch that is open.

    Attributes:
        steps: how many; None while that is unknown.
        next: the first batch that was not handed out.
        returned: batches whose worker was lost, to be handed out again.
    """

    fit: int
    number: int
    steps: int | None
    next: int = 0
    returned: list[int] = field(default_factory=list)

    @property
    def exhausted(self) -> bool:
        """Whether all batches have been handed out."""
        return not self.returned and self.steps is not None and self.next >= self.steps

    def take(self) -> int | None:
        if self.returned:
            return self.returned.pop(0)
        if self.exhausted:
            return None
        self.next += 1
        return self.next - 1


class StepSchedule:
    """Used by one thread for each worker; each call says for which.

    Args:
        names: of the workers, by number.
        start_s: how long to wait for tasks that are only starting; all other waits are as long as the caller says.
        relink_s, chief_relink_s: see `ConnectedWorkers`.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        start_s: float,
        relink_s: float = 0.0,
        chief_relink_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._names = names
        self.clock = clock
        self._start_s = start_s
        self._changed = threading.Condition()
        self._presence = ConnectedWorkers(names, relink_s=relink_s, chief_relink_s=chief_relink_s, clock=clock)
        self._chief_left = False
        self.stop_asked = -1  # in which `fit` a worker has asked for its end
        self._failure: Callable[[], PhalanxError] | None = None  # what has ended the training for all
        self._rules: UpdateRules | None = None
        self._epoch: _Epoch | None = None
        self._on_hold = False
        self._session = -1
        self._began = False  # whether an epoch of this `fit` was opened
        self._last_progress = 0.0
        self._chief_heard_at = 0.0
        self._ended_fit = -1
        self._serial = 0
        self._newest = -1  # the step of the highest serial that is over
        self.era = 0
        self._took: set[Worker] = set()  # those that took part in the epoch
        self._made: dict[int, int] = {}  # steps of the former epochs of this `fit`
        self._held: dict[int, Ticket] = {}  # by serial: those whose step is still to come
        self._joint: Ticket | None = None  # the step that all make together now
        self._joint_given: set[Worker] = set()
        self._steps_of: dict[Worker, int] = {}
        self._reports = EpochReports()
        self._begun_by = ""  # the incarnation of the chief that has declared the `fit`
        self._order: tuple[int, int, Array] = (-1, -1, np.zeros(0, np.int64))
        self._told: dict[str, tuple[int, list[Array]]] = {}
        self.global_step = 0
        self.lost_batches = 0
        """Of this `fit`: handed out, and trained by nobody as far as is known."""
        self._losses_described = 0
        self._rejoined: dict[Worker, tuple[Rejoin, Array | None]] = {}
        self._rebuilt = True  # False while this is to be made anew from what the workers say
        self._rebuild_since = 0.0
        self._proved = -1  # steps up to this serial had been applied, and counted, when this schedule was made anew
        self._fresh: set[Worker] = set()  # those that came meanwhile, as new processes

    # Who is here.

    def chief_left(self) -> None:
        """The chief has no more to do: who waits for it waits in vain."""
        with self._changed:
            self._chief_left = True
            self._changed.notify_all()

    def heard_of_chief(self) -> None:
        """It lives, and is about something: who waits for it does not wait in vain."""
        self._chief_heard_at = self.clock()

    @property
    def has_chief_left(self) -> bool:
        return self._chief_left

    def begin(self, rules: UpdateRules, fit: int, step: int = 0, era: int | None = None) -> None:
        """A `fit` begins, under these rules, with the values of a global step; the same one again if the chief was
        started again. It is of this era; None: of the next one."""
        with self._changed:
            self._rules = rules
            self._rebuilt = True
            chief = self._presence.process(CHIEF)
            # A chief that was started again goes on from what it has restored, and so does the count.
            went_back = bool(self._begun_by and chief) and chief != self._begun_by
            self.global_step = step if went_back else max(self.global_step, step)
            self._begun_by = chief
            self._on_hold = False
            self.era = self.era + 1 if era is None else era
            self._ended_fit = fit - 1
            self.stop_asked = -1
            self._proved = self._newest = -1
            self._order = (-1, -1, np.zeros(0, np.int64))
            self._made.clear()
            self.lost_batches = self._losses_described = 0
            self._began = False
            self._epoch = None
            self._joint = None
            self._held.clear()
            self._reports.clear()
            self._steps_of = dict.fromkeys(self._presence.linked, 0)
            self._changed.notify_all()

    def resume(self, state: GroupState) -> None:
        """A `fit` goes on, or has ended, that began under another schedule."""
        with self._changed:
            self.begin(state.declared.rules, state.declared.fit)
            self.era, self.global_step = state.era, state.step
            self._presence.seen.update(range(len(self._names)))  # all came to its start
            if state.ended:
                self.end_fit(state.declared.fit)

    def attach(self, worker: Worker, incarnation: str) -> None:
        """A worker is here, by the link of this name (`link_name`); one that it had before counts no more."""
        with self._changed:
            self._leave(worker)
            self._presence.enter(worker, incarnation)
            # One that comes late is not behind: the others must not wait until it has made as many steps.
            self._steps_of[worker] = min(self._steps_of.values(), default=0)
            self._changed.notify_all()

    def detach(self, worker: Worker, incarnation: str, *, goodbye: bool = False, why: str = "") -> None:
        """The worker is gone, with a `goodbye` or without, and then perhaps it is known `why`: a sentence."""
        with self._changed:
            if self._presence.has_link(worker, incarnation):
                self._leave(worker)
                if not goodbye:
                    self._presence.miss(worker, why)
                    self._miss(lambda: self.lost(worker, "training"))
                self._changed.notify_all()

    def lost(self, worker: Worker, during: str) -> PeerLostError:
        """The error that names a worker that is not here any more."""
        return self._presence.lost(worker, during)

    def check(self) -> None:
        """Raise what has ended the training for all, if something has: the loss of a worker that was needed."""
        if self._failure is not None:
            raise self._failure()

    def _miss(self, failure: Callable[[], PhalanxError]) -> None:
        if self._rules is not None and self._rules.all_required and self._failure is None:
            self._failure = failure

    def evict(self, worker: Worker) -> None:
        """Go on without a worker that does not come; what it still sends over the link that it has is refused."""
        with self._changed:
            if self.is_present(worker):
                if self._rules is not None and self._rules.all_required:
                    self._miss(lambda: _did_not_come(f"{self._names[worker]} did not make its part of a step"))
                else:
                    logger.warning("%s makes no progress: going on without it.", self._names[worker])
            self._presence.evict(worker)
            self._leave(worker)
            self._changed.notify_all()

    def forget_evicted(self) -> None:
        """This schedule was not the one that counts: who was missed here was elsewhere."""
        with self._changed:
            self._presence.forget_evicted()

    def is_evicted(self, incarnation: str) -> bool:
        return self._presence.is_evicted(incarnation)

    def is_present(self, worker: Worker) -> bool:
        """Whether a worker is linked, or is expected to be in a moment."""
        return self._presence.is_here(worker)

    def _leave(self, worker: Worker) -> None:
        self._presence.leave(worker)
        self._rejoined.pop(worker, None)
        if worker == CHIEF:
            self._on_hold = False
        self._steps_of.pop(worker, None)
        self._joint_given.discard(worker)
        for ticket in [ticket for ticket in self._held.values() if ticket.member == worker]:
            del self._held[ticket.serial]
            if self._is_open(ticket):
                self._give_back(ticket)
        joint = self._joint
        if joint is not None and self._presence.linked.isdisjoint(joint.members):
            self._joint = None
            if self._is_open(joint):
                self._give_back(joint)

    def _give_back(self, ticket: Ticket) -> None:
        assert self._epoch is not None
        if ticket.batch not in self._epoch.returned:
            self._epoch.returned.append(ticket.batch)
            self._epoch.returned.sort()

    def _is_open(self, ticket: Ticket) -> bool:
        epoch = self._epoch
        return epoch is not None and (epoch.fit, epoch.number) == (ticket.fit, ticket.epoch)

    # After this server was started again.

    def await_workers(self) -> None:
        """Another process led before, and its workers are on their way here: they are not lost."""
        with self._changed:
            self._presence.expect_all(REJOIN_S)

    def await_rejoins(self) -> None:
        """This schedule is new in the middle of a `fit`: it is made anew from what the workers tell of themselves."""
        with self._changed:
            self._rebuilt = False
            self._rebuild_since = self.clock()
            self._rejoined.clear()
            self._fresh.clear()

    def rejoin(self, worker: Worker, message: Rejoin, order: Array | None) -> None:
        """A worker is back after its link was lost, and says where it is."""
        with self._changed:
            self.global_step = max(self.global_step, message.step)
            if self._rebuilt:
                self._hold_again(message)
            else:
                self._rejoined[worker] = (message, order)
                self._fresh.discard(worker)
                if len(self._rejoined) == len(self._names):
                    self._rebuild()
            self._changed.notify_all()

    def wait_until_rebuilt(self, worker: Worker, timeout_s: float) -> None:
        """Before anything else that this worker asks: wait for the workers to rejoin, for the chief at most `timeout_s`
        and for the others less; new processes have nothing to tell."""
        with self._changed:
            if not self._rebuilt and worker not in self._rejoined:
                self._fresh.add(worker)
            while not self._rebuilt:
                waited_s = self.clock() - self._rebuild_since
                all_came = len(self._rejoined.keys() | self._fresh) == len(self._names)
                if CHIEF in self._rejoined and (all_came or waited_s > min(REJOIN_S, timeout_s / 2)):
                    self._rebuild()
                    self._changed.notify_all()
                else:
                    self._wait(self._rebuild_since + timeout_s, lambda: f"{self._names[CHIEF]} did not come back")

    def _hold_again(self, message: Rejoin) -> None:
        """Only the link was lost: the worker still makes the steps that were taken from it then."""
        for ticket in message.tickets:
            if self._joint is not None and self._joint.serial == ticket.serial:
                self._joint_given.add(ticket.member)
            elif self._epoch is not None and self._is_open(ticket) and ticket.batch in self._epoch.returned:
                self._epoch.returned.remove(ticket.batch)
                self._held[ticket.serial] = ticket

    def _rebuild(self) -> None:
        chief, order = self._rejoined[CHIEF]
        here = [message for message, _ in self._rejoined.values() if message.era == self.era]
        same = [m for m in here if (m.fit, m.epoch) == (chief.fit, chief.epoch)]
        tickets = [ticket for message in same for ticket in message.tickets]
        self._serial = max([t.serial for t in tickets] + [m.finished for m in here], default=0)
        if self._rules is not None and self._rules.synchronous:
            self._proved = max((m.finished for m in here), default=-1)
        self._rebuilt = True
        if not chief.opened or chief not in same:  # what it asks next opens the epoch
            self._rejoined.clear()
            return
        self._epoch = _Epoch(chief.fit, chief.epoch, None if chief.steps < 0 else chief.steps)
        self._epoch.next = max(message.batches for message in same)
        self._began = True
        self._order = (chief.fit, chief.order_epoch, np.zeros(0, np.int64) if order is None else order)
        # Those that are ahead have reported, and do so once more.
        self._took = {w for w, (m, _) in self._rejoined.items() if m in here and m.epoch >= chief.epoch}
        self._last_progress = self.clock()
        assert self._rules is not None
        if not self._rules.synchronous:
            self._held = {ticket.serial: ticket for ticket in tickets}
            known = len(self._held) + sum(message.steps_made for message in same)
            # Who has gone on was told that the epoch is over: then nobody held any of it.
            ahead = any((m.fit, m.epoch) > (chief.fit, chief.epoch) for m in here)
            if not ahead and (unknown := self._epoch.next - known) > 0:
                self.lost_batches += unknown
                logger.warning(
                    "Up to %d batches of epoch %d are lost: they had been handed out, and no worker that is here has "
                    "them or has trained them.",
                    unknown,
                    chief.epoch + 1,
                )
        elif tickets:
            # One that has finished the newest step has proved that it was applied: the next one may be given out.
            joint = max(tickets, key=lambda ticket: ticket.serial)
            if all(message.finished < joint.serial for message in here):
                self._joint = joint
                self._joint_given = {ticket.member for ticket in tickets if ticket.serial == joint.serial}
        self._rejoined.clear()

    # Epochs.

    def open_epoch(self, fit: int, number: int, steps: int | None, order: Array | None) -> None:
        """The chief opens an epoch. In synchronous training, wait for all workers before the first one."""
        with self._changed:
            assert self._rules is not None
            if self._epoch is not None and (self._epoch.fit, self._epoch.number) == (fit, number):
                # The chief asks once more after its link was lost.
                self._epoch.steps = steps if self._epoch.steps is None else self._epoch.steps
                if order is not None:
                    self._order = (fit, number, order)
                return
            if self._rules.synchronous and self._epoch is None:
                until = self.clock() + self._start_s
                while missing := self._presence.never_seen():
                    self._wait(until, lambda missing=missing: f"{missing} did not come to `fit`")  # type: ignore[misc]
                absent = self._presence.seen - self._presence.linked
                if absent and self._rules.all_required:
                    raise self.lost(min(absent), "the start of `fit`")
            self._note_steps()
            self._took.clear()
            self._reports.clear()
            self._epoch = _Epoch(fit, number, steps)
            self._began = True
            self._last_progress = self.clock()
            if order is not None:
                self._order = (fit, number, order)
            self._joint = None
            self._held.clear()
            self._changed.notify_all()

    def order(self, fit: int, number: int, era: int, timeout_s: float) -> Array | EpochOver | FitOver:
        """The order of the samples in the pass that began with this epoch; waits until the chief has told it, or will
        not any more."""
        with self._changed:
            asked, patience_s = self.clock(), timeout_s if self._began else self._start_s
            while True:
                self.check()
                if (over := self._is_over(fit, era)) is not None:
                    return over
                if self._order[:2] >= (fit, number):
                    return self._order[2]
                until = max(asked, self._chief_heard_at) + patience_s
                self._wait(until, lambda: f"{self._names[CHIEF]} did not begin epoch {number + 1} of `fit`")

    def _is_over(self, fit: int, era: int) -> EpochOver | FitOver | None:
        """What a worker is told that asks for something of a `fit` that the chief has ended, or has begun anew."""
        if self._ended_fit >= fit:
            return FitOver()
        if self._epoch is not None and self._epoch.fit == fit and era != self.era:
            return EpochOver(back_to=self._epoch.number, era=self.era)
        return None

    def end_epoch(self, fit: int, number: int) -> int:
        """No more steps of this epoch are handed out; returns how many there are. Asked for twice it is the same."""
        with self._changed:
            epoch = self._epoch
            if epoch is not None and (epoch.fit, epoch.number) == (fit, number):
                epoch.steps = self._steps_made()
                epoch.returned = []
                self._changed.notify_all()
            return self._steps_made()

    def has_ended(self, fit: int) -> bool:
        """Whether the chief has ended this `fit`."""
        return self._ended_fit >= fit

    def end_fit(self, fit: int) -> None:
        with self._changed:
            self._note_steps()
            self._ended_fit = max(self._ended_fit, fit)
            self._epoch = None
            self._rebuilt = True
            self._changed.notify_all()

    def _note_steps(self) -> None:
        if self._epoch is not None:
            self._made[self._epoch.number] = self._steps_made()

    def _steps_made(self) -> int:
        epoch = self._epoch
        if epoch is None:
            return 0
        return epoch.next if epoch.steps is None else min(epoch.next, epoch.steps)

    # Steps.

    def take(
        self, worker: Worker, incarnation: str, fit: int, number: int, era: int, timeout_s: float
    ) -> Ticket | EpochOver | FitOver:
        """The worker's next ticket in this epoch; waits until there is one or will be none."""
        with self._changed:
            asked = since = self.clock()
            blocked_since: float | None = None
            while True:
                self.check()
                epoch = self._epoch
                if not self._presence.has_link(worker, incarnation):
                    raise EvictedError(f"{self._names[worker]} was left out, or started again in another process.")
                if (over := self._is_over(fit, era)) is not None:
                    return over
                if epoch is not None and (epoch.fit, epoch.number) > (fit, number):
                    return EpochOver(self._made.get(number, 0))
                if epoch is not None and (epoch.fit, epoch.number) == (fit, number):
                    answer = self._assign(worker, epoch)
                    if answer is not None:
                        self._changed.notify_all()
                        return answer
                    asked = self.clock()  # it is being trained: nobody waits in vain
                    idle_s = self.clock() - max(since, self._last_progress)
                    if epoch.exhausted and self._held and idle_s > timeout_s:
                        for ticket in list(self._held.values()):
                            self.evict(ticket.member)
                        continue
                    slowest = None if epoch.exhausted else self._holding_back(worker)
                    blocked_since = (blocked_since or self.clock()) if slowest is not None else None
                    if slowest is not None and blocked_since and self.clock() - blocked_since > timeout_s:
                        self.evict(slowest)
                        continue
                patience_s = timeout_s if self._began else self._start_s
                until = max(asked, self._last_progress, self._chief_heard_at) + patience_s
                self._wait(until, lambda: f"{self._names[CHIEF]} did not begin epoch {number + 1} of `fit`")

    def try_take(self, worker: Worker, incarnation: str, fit: int, number: int, era: int) -> Ticket | None:
        """A ticket, if there is one at hand."""
        with self._changed:
            epoch = self._epoch
            if epoch is None or (epoch.fit, epoch.number, self.era) != (fit, number, era):
                return None
            if not self._presence.has_link(worker, incarnation):
                return None
            answer = self._assign(worker, epoch)
            return answer if isinstance(answer, Ticket) else None

    def _assign(self, worker: Worker, epoch: _Epoch) -> Ticket | EpochOver | None:
        assert self._rules is not None
        if self._rules.synchronous:
            return self._assign_jointly(worker, epoch)
        self._took.add(worker)
        if self._on_hold:
            return None
        if epoch.exhausted:
            return None if self._held else EpochOver(self._steps_made())  # a ticket that is held may come back
        if self._holding_back(worker) is not None:
            return None
        batch = epoch.take()
        assert batch is not None, "it is not exhausted"
        self._serial += 1
        ticket = Ticket(epoch.fit, epoch.number, batch, (worker,), worker, self._serial, self.era)
        self._held[ticket.serial] = ticket
        return ticket

    def _assign_jointly(self, worker: Worker, epoch: _Epoch) -> Ticket | EpochOver | None:
        if self._joint is None:
            if self._on_hold:
                return None
            batch = epoch.take()
            if batch is None:
                return EpochOver(self._steps_made(), newest=self._newest)
            self._serial += 1
            self._joint_given = set()
            members = tuple(sorted(self._presence.linked))
            self._joint = Ticket(epoch.fit, epoch.number, batch, members, worker, self._serial, self.era)
        joint = self._joint
        if worker in self._joint_given or worker not in joint.members:
            return None
        self._joint_given.add(worker)
        return Ticket(joint.fit, joint.epoch, joint.batch, joint.members, worker, joint.serial, joint.era)

    def _holding_back(self, worker: Worker) -> Worker | None:
        """In bounded staleness: the slowest worker, if this one may not run further ahead of it."""
        assert self._rules is not None
        if self._rules.staleness < 0 or worker not in self._steps_of:
            return None
        slowest = min(self._steps_of, key=lambda other: self._steps_of[other])
        begun = self._steps_of[worker] + sum(ticket.member == worker for ticket in self._held.values())
        ahead = begun - self._steps_of[slowest]
        return slowest if ahead > self._rules.staleness else None

    def done(self, ticket: Ticket, *, applied: bool = True) -> None:
        """The step of this ticket is over; `applied`, or refused as it was not finite."""
        with self._changed:
            # Those of updates outside of epochs are negative.
            is_repeated = 0 <= ticket.serial <= self._proved
            self.global_step += applied and not is_repeated
            self._last_progress = self.clock()
            self._newest = max(self._newest, ticket.serial)
            if ticket.member in self._steps_of:
                self._steps_of[ticket.member] += 1
            self.confirm(ticket)

    def confirm(self, ticket: Ticket) -> None:
        """The step of this ticket was applied before this schedule was made: it is over."""
        with self._changed:
            if self._joint is not None and self._joint.serial == ticket.serial:
                self._joint = None
            self._held.pop(ticket.serial, None)
            self._changed.notify_all()

    def no_batch(self, ticket: Ticket, *, ends: bool) -> None:
        """The worker has no batch for its ticket: the epoch ends before it, or a stream has passed it by."""
        with self._changed:
            epoch = self._epoch
            self._held.pop(ticket.serial, None)
            if self._joint is not None and self._joint.serial == ticket.serial:
                self._joint = None
            if epoch is not None and self._is_open(ticket):
                if ends:
                    epoch.steps = ticket.batch if epoch.steps is None else min(epoch.steps, ticket.batch)
                    epoch.returned = [batch for batch in epoch.returned if batch < epoch.steps]
                else:
                    self.lost_batches += 1
                    logger.warning("Batch %d of epoch %d is lost with its worker.", ticket.batch, ticket.epoch + 1)
            self._changed.notify_all()

    def hold(self, timeout_s: float) -> None:
        """Hand out no more steps, and wait until all have been made but the chief's own, which asks for this."""
        with self._changed:
            self._on_hold = True
            until = self.clock() + timeout_s
            # Until the chief is lost, which asks for this.
            while self._on_hold and (late := {ticket.member for ticket in self._held.values()} - {CHIEF}):
                if self.clock() > until:
                    for worker in late:
                        self.evict(worker)
                else:
                    self._changed.wait(POLL_S)

    def go_on(self) -> None:
        with self._changed:
            self._on_hold = False
            self._changed.notify_all()

    # Managed sessions.

    def begin_session(self, worker: Worker, session: int) -> None:
        """The chief has restored what this session starts from; or another worker waits until it has."""
        with self._changed:
            if worker == CHIEF:
                self._session = max(self._session, session)
                self._changed.notify_all()
            until = self.clock() + self._start_s
            while self._session < session:
                self._wait(until, lambda: f"{self._names[CHIEF]} did not begin its managed session")

    # What the chief tells.

    def tell(self, subject: str, fit: int, arrays: list[Array], *, once: bool) -> list[Array]:
        """Keep it for those who ask, and return what holds now: with `once` what was told first."""
        with self._changed:
            if not (once and subject in self._told):
                self._told[subject] = (fit, arrays)
                self._changed.notify_all()
            return self._told[subject][1]

    def hear(self, subject: str, fit: int) -> list[Array] | None:
        """What the chief has told of this for `fit` or a later one; waits until it has. None if it left without."""
        with self._changed:
            until = self.clock() + self._start_s
            while subject not in self._told or self._told[subject][0] < fit:
                if self._chief_left:
                    return None
                self._wait(until, lambda: f"{self._names[CHIEF]} did not tell of its {subject}")
            return self._told[subject][1]

    # What the workers counted.

    def report(self, worker: Worker, report: EpochReport, arrays: list[Array]) -> None:
        with self._changed:
            if self._epoch is None or (self._epoch.fit, self._epoch.number) != (report.fit, report.epoch):
                return  # of an epoch that was collected without it
            self._took.add(worker)
            self._reports.add(worker, report, arrays)
            self._changed.notify_all()

    def describe_losses(self) -> str:
        """What the chief should know of batches that nobody has trained, if there are more than it was told of."""
        count = self.lost_batches
        if count <= self._losses_described:
            return ""
        self._losses_described = count
        return f"{count} {'batch' if count == 1 else 'batches'} of this fit() lost with workers or a server"

    def collect(self, fit: int, epoch: int, timeout_s: float) -> tuple[list[Array], int, int]:
        """The merged report of an epoch, its samples, and how many steps it had; waits for all workers present."""
        with self._changed:
            until = self.clock() + timeout_s
            while True:
                late = [worker for worker in self._took - self._reports.by(fit, epoch) if self.is_present(worker)]
                if not late:
                    return *self._reports.merged(fit, epoch), self._steps_made()
                if self.clock() > until:
                    for worker in late:
                        self.evict(worker)
                    continue
                self._changed.wait(POLL_S)

    def _wait(self, until: float, reason: Callable[[], str]) -> None:
        if self._chief_left:
            raise self.lost(CHIEF, "fit")
        remaining = until - self.clock()
        if remaining <= 0:
            if CHIEF not in self._presence.seen:
                raise RendezvousError(
                    f"{self._names[CHIEF]} has not come to the job within the time set. Is it started, with the same "
                    f"cluster?"
                )
            if CHIEF not in self._presence.linked:
                raise self.lost(CHIEF, "fit; it did not come back within the time set")
            raise _did_not_come(reason())
        self._changed.wait(min(remaining, POLL_S))


def _did_not_come(reason: str) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(
        f"{reason} within the time set (PHALANX_TIMEOUT). It is connected, so it is busy, stopped or waiting "
        f"for something else."
    )
