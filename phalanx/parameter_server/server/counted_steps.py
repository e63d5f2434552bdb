"""The steps that the global step includes: a repeated push must not count again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.parameter_server.server_messages import Ticket
from phalanx.parameter_server.server_protocol import Worker


class CountedSteps:
    """Serials of counted steps. Protected by the schedule's lock.

    A new head resumes from the highest count that a worker has received. It includes steps whose workers never got a
    response, and which they repeat. In synchronous training, where all workers take each step together, a member that
    got a response proves such a step. In asynchronous training, responses contain the newest step of each worker that
    is in the count; a worker sends no gradients before its earlier ones are answered, so it can repeat no other step.

    Attributes:
        counted_up_to: Serial up to which steps were counted before this process took the lead, in synchronous training.
    """

    def __init__(self) -> None:
        self.counted_up_to = -1
        self._newest: dict[Worker, int] = {}  # serials, in asynchronous training

    def resume(self, held: Iterable[Ticket], serials: Iterable[int]) -> None:
        """In asynchronous training, resume: of the tickets that workers hold, these steps are counted."""
        counted = set(serials)
        self._newest = {ticket.member: ticket.serial for ticket in held if ticket.serial in counted}

    def includes(self, ticket: Ticket) -> bool:
        """Whether the step of this ticket is counted."""
        # Updates outside epochs have negative serials, and several share one.
        return 0 <= ticket.serial <= self.counted_up_to or self._newest.get(ticket.member) == ticket.serial

    def add(self, ticket: Ticket) -> None:
        """In asynchronous training, add the step of this ticket."""
        if ticket.serial >= 0:
            self._newest[ticket.member] = ticket.serial

    def serials(self) -> tuple[int, ...]:
        """Serials of the counted steps; see `Values.counted_serials`."""
        return tuple(self._newest.values())
