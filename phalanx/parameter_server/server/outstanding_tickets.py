"""Outstanding tickets: steps that workers are to take and that are not applied yet. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from phalanx.parameter_server.server_messages import Ticket
from phalanx.parameter_server.server_protocol import Worker


class OutstandingTickets:
    """Holders of tickets. Protected by the schedule's lock.

    In asynchronous training each ticket belongs to one worker. In synchronous training there is one *joint* step at a
    time, and each of its members receives a copy of its ticket.

    Attributes:
        by_serial: Tickets of single workers.
        joint_ticket: Ticket of the step that all workers are taking now.
    """

    def __init__(self) -> None:
        self.by_serial: dict[int, Ticket] = {}
        self.joint_ticket: Ticket | None = None
        self._joint_holders: set[Worker] = set()  # members that have received their copy

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Add outstanding tickets of single workers."""
        self.by_serial |= {ticket.serial: ticket for ticket in tickets}

    def begin_joint_step(self, ticket: Ticket, holders: Iterable[Worker] = ()) -> None:
        """Begin a joint step, or continue it if some of its members already hold its ticket."""
        self.joint_ticket, self._joint_holders = ticket, set(holders)

    def issue_joint_ticket(self, worker: Worker) -> Ticket | None:
        """The worker's copy of the joint ticket; None if it already has one, or is not a member."""
        joint = self.joint_ticket
        if joint is None or worker in self._joint_holders or worker not in joint.members:
            return None
        self._joint_holders.add(worker)
        return Ticket(joint.fit, joint.epoch, joint.batch, joint.members, worker, joint.serial, joint.era)

    def settle(self, serial: int) -> None:
        """Remove the tickets of this step, which is over."""
        if self.joint_ticket is not None and self.joint_ticket.serial == serial:
            self.joint_ticket = None
        self.by_serial.pop(serial, None)

    def restore_joint_ticket(self, ticket: Ticket) -> bool:
        """Return a ticket of the joint step to its member. Returns whether the ticket is of that step."""
        if self.joint_ticket is None or self.joint_ticket.serial != ticket.serial:
            return False
        self._joint_holders.add(ticket.member)
        return True

    def release(self, worker: Worker, connected: Collection[Worker]) -> list[Ticket]:
        """Remove a lost worker. Returns the tickets whose batches must be issued again."""
        self._joint_holders.discard(worker)
        released = [ticket for ticket in self.by_serial.values() if ticket.member == worker]
        for ticket in released:
            del self.by_serial[ticket.serial]
        # As long as one member remains, the merge completes without the lost worker, and its batch counts as trained.
        if self.joint_ticket is not None and not any(member in connected for member in self.joint_ticket.members):
            released.append(self.joint_ticket)
            self.joint_ticket = None
        return released

    def holders(self) -> set[Worker]:
        """The workers that hold single tickets."""
        return {ticket.member for ticket in self.by_serial.values()}

    def count_of(self, worker: Worker) -> int:
        """Number of single tickets that a worker holds."""
        return sum(ticket.member == worker for ticket in self.by_serial.values())
