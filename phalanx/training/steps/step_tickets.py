"""A worker's tickets: which steps it makes next, which are on their way to the servers, and which are applied. Pure."""

from __future__ import annotations

from collections import deque

from phalanx.parameter_server.server_messages import FitJoined, Rejoin, Ticket, Values


class StepTickets:
    """A worker's knowledge of the schedule.

    Attributes:
        fit: number of the `fit` call.
        era: era of the `fit`.
        ahead: as for `DeclareModel`.
        current: the ticket of the step that is being made; None before the first.
        phase: number of merges of that step so far.
    """

    def __init__(self) -> None:
        self.fit = -1
        self.era = self.ahead = 0
        self.current: Ticket | None = None
        self.phase = 0
        self._counted: tuple[int, ...] = ()  # of the global step that the head said last; see `Values`
        # Issued by the head, not begun; the next step takes the first.
        self._waiting: deque[Ticket] = deque()
        self._unapplied: dict[int, Ticket] = {}  # by serial: steps that are not applied, as far as this worker knows
        self._pushed: deque[int] = deque()  # serials of the steps whose gradients are on their way
        self._finished = -1  # serial of the last applied step
        self._handed_out = (-1, 0)  # an epoch, and how many of its batches are known to be handed out
        self._made = (-1, 0)  # an epoch, and how many of its steps this worker has made

    def begin_fit(self, fit: int) -> None:
        """Another `fit` begins."""
        self.fit = fit
        self._waiting.clear()
        self._pushed.clear()
        self.forget()

    def begin_era(self, era: int) -> None:
        """The chief has gone back, in a new era."""
        self.era = era
        self.forget()

    def forget(self) -> None:
        """The tickets of the old era are void."""
        self._unapplied.clear()
        self._handed_out = self._made = (-1, 0)

    def add(self, ticket: Ticket) -> None:
        """The head has issued a ticket."""
        self._waiting.append(ticket)
        self._unapplied[ticket.serial] = ticket
        known = self._handed_out[1] if self._handed_out[0] == ticket.epoch else 0
        self._handed_out = (ticket.epoch, max(known, ticket.batch + 1))

    def begin_step(self) -> Ticket:
        """The ticket of the next step, which begins."""
        self.current = self._waiting.popleft()
        self.phase = 0
        return self.current

    def put_back(self, ticket: Ticket) -> None:
        """The next step begins with this ticket, which was taken."""
        self._waiting.appendleft(ticket)

    def upcoming(self) -> Ticket | None:
        """The ticket of the step after this one, if it is at hand."""
        return self._waiting[0] if self._waiting else None

    def drop_upcoming(self) -> None:
        """That ticket has no batch."""
        self._waiting.popleft()

    def push(self, serial: int) -> None:
        """The gradients of a step are on their way."""
        self._pushed.append(serial)

    def complete_push(self) -> None:
        """The head has applied the step that was pushed first."""
        if self._pushed:
            self._finished = self._pushed.popleft()
            self._count(self._unapplied.pop(self._finished, None))

    def abandon(self, ticket: Ticket) -> None:
        """No step is made for this ticket."""
        self._count(self._unapplied.pop(ticket.serial, None))

    def _count(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            epoch, made = self._made
            # Also tickets that were abandoned: a new head counts how much of the epoch is done.
            self._made = (ticket.epoch, made + 1 if epoch == ticket.epoch else 1)

    def note_count(self, answer: Values | FitJoined) -> int:
        """The head has said how many updates the job has made, and which are among them; returns their number."""
        self._counted = answer.counted
        return answer.step

    def rejoin(self, version: int, step: int, epoch: int, steps: int, order_epoch: int, *, opened: bool) -> Rejoin:
        """This worker's position in the training, for a server that comes back; arguments as for `Rejoin`."""
        return Rejoin(
            fit=self.fit,
            era=self.era,
            epoch=epoch,
            version=version,
            tickets=tuple(self._unapplied.values()),
            batches=self._handed_out[1] if self._handed_out[0] == epoch else 0,
            finished=self._finished,
            step=step,
            steps=steps,
            order_epoch=order_epoch,
            opened=opened,
            steps_made=self._made[1] if self._made[0] == epoch else 0,
            counted=self._counted,
        )
