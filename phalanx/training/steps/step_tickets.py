"""A worker's tickets: the steps that it takes next, that are in flight to the servers, and that are applied. Pure."""

from __future__ import annotations

from collections import deque

from phalanx.parameter_server.server_messages import FitJoined, Rejoin, Ticket, Values


class StepTickets:
    """A worker's view of the schedule.

    Attributes:
        fit: Number of the `fit` call.
        era: Era of the `fit`.
        step_offset: See `DeclareModel`.
        current: The ticket of the current step; None before the first.
        phase: Number of merges of that step so far.
    """

    def __init__(self) -> None:
        self.fit = -1
        self.era = self.step_offset = 0
        self.current: Ticket | None = None
        self.phase = 0
        # Included in the global step that the head reported last; see `Values`.
        self._counted_serials: tuple[int, ...] = ()
        # Issued by the head, not begun; the next step takes the first.
        self._waiting: deque[Ticket] = deque()
        self._unapplied: dict[int, Ticket] = {}  # by serial: steps that are not applied, to this worker's knowledge
        self._pushed: deque[int] = deque()  # serials of the steps whose gradients are in flight
        self._finished = -1  # serial of the last applied step
        self._handed_out = (-1, 0)  # an epoch, and how many of its batches are known to be handed out
        self._taken_steps = (-1, 0)  # an epoch, and how many of its steps this worker has taken

    def begin_fit(self, fit: int) -> None:
        """Begin another `fit`."""
        self.fit = fit
        self._waiting.clear()
        self._pushed.clear()
        self.discard()

    def begin_era(self, era: int) -> None:
        """Begin a new era, to which the chief has gone back."""
        self.era = era
        self.discard()

    def discard(self) -> None:
        """Discard the tickets of the old era, which are void."""
        self._unapplied.clear()
        self._handed_out = self._taken_steps = (-1, 0)

    def add(self, ticket: Ticket) -> None:
        """Add a ticket that the head has issued."""
        self._waiting.append(ticket)
        self._unapplied[ticket.serial] = ticket
        known = self._handed_out[1] if self._handed_out[0] == ticket.epoch else 0
        self._handed_out = (ticket.epoch, max(known, ticket.batch + 1))

    def begin_step(self) -> Ticket:
        """Begin the next step, and return its ticket."""
        self.current = self._waiting.popleft()
        self.phase = 0
        return self.current

    def put_back(self, ticket: Ticket) -> None:
        """Put back a ticket that was taken, so that the next step uses it."""
        self._waiting.appendleft(ticket)

    def upcoming(self) -> Ticket | None:
        """Return the ticket of the step after this one, if it is available."""
        return self._waiting[0] if self._waiting else None

    def drop_upcoming(self) -> None:
        """Discard the upcoming ticket, which has no batch."""
        self._waiting.popleft()

    def push(self, serial: int) -> None:
        """Record that the gradients of a step are in flight."""
        self._pushed.append(serial)

    def complete_push(self) -> None:
        """Record that the head has applied the oldest pushed step."""
        if self._pushed:
            self._finished = self._pushed.popleft()
            self._count(self._unapplied.pop(self._finished, None))

    def skip(self, ticket: Ticket) -> None:
        """Record that no step is taken for this ticket."""
        self._count(self._unapplied.pop(ticket.serial, None))

    def _count(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            epoch, taken = self._taken_steps
            # Skipped tickets count, too: a new head needs to know how much of the epoch is done.
            self._taken_steps = (ticket.epoch, taken + 1 if epoch == ticket.epoch else 1)

    def record_step_count(self, answer: Values | FitJoined) -> int:
        """Record which updates the head has included in the global step; return that step."""
        self._counted_serials = answer.counted_serials
        return answer.step

    def rejoin(
        self, version: int, step: int, epoch: int, steps: int, order_epoch: int, *, is_epoch_opened: bool
    ) -> Rejoin:
        """Return this worker's position in the training, for a server that recovers; arguments as for `Rejoin`."""
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
            is_epoch_opened=is_epoch_opened,
            steps_taken=self._taken_steps[1] if self._taken_steps[0] == epoch else 0,
            counted_serials=self._counted_serials,
        )
