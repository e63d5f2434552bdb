"""The links between the members of a generation. Working links are kept for the next generation.

One order (`FormGeneration`) gives each task the addresses of all members. If two members have no link, the one with the
higher rank dials. Jobs of fixed size, elastic jobs and Horovod's process sets connect in this way.
"""

from __future__ import annotations

import threading
import time

from phalanx.cluster.membership import Membership, Rank
from phalanx.cluster.membership_messages import MESH, FormGeneration, MemberAddress
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import HandshakeError, LinkClosedError, LinkTimeoutError, PhalanxError
from phalanx.transport.address import Address
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

LINK_UP_S = 5.0
"""Time limit for the links of one generation, whose members have all just been in contact."""
ENDED_GRACE_S = 0.5
"""How long a collective may continue in a generation that has ended. Usually the links reveal the loss immediately,
with more details."""


class GenerationNotFormedError(PhalanxError):
    """The links of a generation could not be established: one of its members was lost meanwhile."""


class MemberLinks:
    """See the top of the file. Implements the listener's `Service`.

    Args:
        identity: Identity of this process.
        purpose: Purpose of the links.

    Attributes:
        membership: The current generation; before the first one, this process alone.
    """

    def __init__(self, identity: TaskIdentity, purpose: str = MESH):
        self._identity = identity
        self._purpose = purpose
        self.membership = Membership(0, 0, (identity.description.as_member(0),))
        # Protects `_arrived`, `_ended` and the exchange of `membership`. Notified when one of them changes.
        self._changed = threading.Condition()
        # Links opened by others that no generation uses yet, with the generation that they are for.
        self._arrived: dict[str, tuple[bytes, Link]] = {}
        self._ended = 0  # the last generation that has ended
        # Links in use, by incarnation. This and the next attribute belong to the thread that forms generations.
        self._links: dict[str, Link] = {}
        self._unreachable: set[str] = set()  # incarnations, since the last `pop_unreachable`

    # See `transport.listener.Service`.

    def admit(self, hello: Hello) -> Welcome:
        del hello  # it has the secret; the coordinator decides whether it is a member
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        with self._changed:
            _, former = self._arrived.get(hello.incarnation, (b"", None))
            self._arrived[hello.incarnation] = hello.details, link
            self._changed.notify_all()
        if former is not None:
            former.close()

    # Generations.

    def connect(self, order: FormGeneration) -> None:
        """Connect to all members of a generation. If two members have no link, the one with the higher rank dials.

        Raises: GenerationNotFormedError if a member cannot be reached or the generation has already ended.
        """
        # No circular waits: the listener's thread of the dialed member adopts the link.
        self.connect_to_lower_ranks(order)
        self.accept_from_higher_ranks(order)

    def connect_to_lower_ranks(self, order: FormGeneration) -> None:
        """Dial the members of lower rank: the first half of `connect`."""
        self._drop_unusable(order)
        deadline = time.monotonic() + LINK_UP_S
        for address in order.members[: self._rank(order)]:
            if address.incarnation not in self._links:
                self._links[address.incarnation] = self._open_link(address, order.generation, deadline)

    def accept_from_higher_ranks(self, order: FormGeneration) -> None:
        """Wait for the links of the members of higher rank: the second half of `connect`."""
        rank, deadline = self._rank(order), time.monotonic() + LINK_UP_S
        for address in order.members[rank + 1 :]:
            if address.incarnation not in self._links:
                self._links[address.incarnation] = self._await_link(address, order.generation, deadline)
        membership = Membership(
            generation=order.generation,
            rank=rank,
            members=tuple(address.as_member(r) for r, address in enumerate(order.members)),
            links={r: self._links[a.incarnation] for r, a in enumerate(order.members) if r != rank},
        )
        with self._changed:
            # Checked and replaced under one lock: later, `generation_ended` finds this membership and sets its end.
            if self._ended >= order.generation:
                membership.state.abort_at = time.monotonic()
            self.membership = membership

    def generation_ended(self, generation: int) -> None:
        """Stop waiting for links or in a collective of this generation. May be called from any thread."""
        with self._changed:
            self._ended = max(self._ended, generation)  # the chief learns of each lost task in a separate thread
            if self.membership.generation == generation:
                self.membership.state.abort_at = time.monotonic() + ENDED_GRACE_S
            self._changed.notify_all()

    def pop_unreachable(self) -> list[str]:
        """Return the incarnations of members that could not be reached or did not answer since the last call."""
        state = self.membership.state
        found = self._unreachable | {self.membership.members[rank].incarnation for rank in state.unresponsive}
        self._unreachable = set()
        state.unresponsive.clear()
        return sorted(found)

    @property
    def open_links(self) -> list[Link]:
        return list(self._links.values())

    def close(self) -> None:
        with self._changed:
            arrived = [link for _, link in self._arrived.values()]
        for link in (*self._links.values(), *arrived):
            link.close()

    def _rank(self, order: FormGeneration) -> Rank:
        own = self._identity.description.incarnation
        return next(rank for rank, address in enumerate(order.members) if address.incarnation == own)

    def _drop_unusable(self, order: FormGeneration) -> None:
        """Close links to former members, broken links, and closed ones (which the network closed if both ends live)."""
        self._adopt_previous_links(order.generation - 1)
        own = self._identity.description.incarnation
        # A process that was not a member before opens new links: existing ones may be from an earlier attempt.
        wanted = {address.incarnation for address in order.members if address.completed >= 0}
        wanted -= {incarnation for pair in order.broken if own in pair for incarnation in pair}
        for incarnation, link in list(self._links.items()):
            if incarnation not in wanted or link.closed or link.peer_closed():
                self._links.pop(incarnation).close()
        with self._changed:  # links of processes that were lost before they became members
            for incarnation, (_, link) in list(self._arrived.items()):
                if link.peer_closed():
                    del self._arrived[incarnation]
                    link.close()

    def _adopt_previous_links(self, generation: int) -> None:
        """Use links of a generation that this process abandoned before it took them: their dialers keep them and do not
        dial again."""
        with self._changed:
            for incarnation, (details, link) in list(self._arrived.items()):
                if details == _details_of(generation):
                    del self._arrived[incarnation]
                    if (broken := self._links.get(incarnation)) is not None:  # or the other end would not have dialed
                        broken.close()
                    self._links[incarnation] = link

    def _open_link(self, member: MemberAddress, generation: int, deadline: float) -> Link:
        address = Address.parse(member.address, where=member.task)
        details = _details_of(generation)
        try:
            link, _ = self._identity.dial_address(
                address, member.task, self._purpose, details, deadline=deadline, bulk=True
            )
        except (LinkClosedError, LinkTimeoutError, HandshakeError) as error:
            self._unreachable.add(member.incarnation)
            raise GenerationNotFormedError(f"{member.task} cannot be reached: {error}") from error
        return link

    def _await_link(self, member: MemberAddress, generation: int, deadline: float) -> Link:
        def has_arrived() -> bool:
            # A link of an earlier attempt, which the other end has abandoned, does not count.
            details, _ = self._arrived.get(member.incarnation, (b"", None))
            return details == _details_of(generation)

        with self._changed:
            self._changed.wait_for(
                lambda: has_arrived() or self._ended >= generation, timeout=deadline - time.monotonic()
            )
            if has_arrived():
                return self._arrived.pop(member.incarnation)[1]
            if self._ended >= generation:
                raise GenerationNotFormedError("another member of the generation was lost")
            self._unreachable.add(member.incarnation)
            raise GenerationNotFormedError(f"{member.task} did not connect")


def _details_of(generation: int) -> bytes:
    """Return the details of the Hello for a link of this generation."""
    return str(generation).encode()
