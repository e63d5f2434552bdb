"""Which steps are in the global step: a repeated push must not count again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.parameter_server.server_messages import Ticket
from phalanx.parameter_server.server_protocol import Worker


class CountedSteps:
    """The schedule's lock protects it.

    A new head resumes the highest count that a worker was told. It contains steps whose makers were not answered any
    more, and which they repeat. In synchronous training, where all make each step together, a member that was answered
    proves such a step. In asynchronous training the answers say the newest step of each worker that is in the count;
    a worker sends no gradients before the former ones are answered, so it can repeat no other.

    Attributes:
        proved: In synchronous training, steps up to this serial were counted before this process took the lead.
    """

    def __init__(self) -> None:
        self.proved = -1
        self._newest: dict[Worker, int] = {}  # serials, in asynchronous training

    def resume(self, held: Iterable[Ticket], serials: Iterable[int]) -> None:
        """In asynchronous training: of the tickets that workers hold, the steps of these serials are counted."""
        counted = set(serials)
        self._newest = {ticket.member: ticket.serial for ticket in held if ticket.serial in counted}

    def includes(self, ticket: Ticket) -> bool:
        """Whether the step of this ticket is counted."""
        # Updates outside of epochs have negative serials, several of them the same.
        return 0 <= ticket.serial <= self.proved or self._newest.get(ticket.member) == ticket.serial

    def add(self, ticket: Ticket) -> None:
        """In asynchronous training: the step of this ticket is counted."""
        if ticket.serial >= 0:
            self._newest[ticket.member] = ticket.serial

    def serials(self) -> tuple[int, ...]:
        """See `Values.counted`."""
        return tuple(self._newest.values())
