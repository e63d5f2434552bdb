"""The links between the members of a generation, kept from one generation to the next where they still work.

Each task knows the addresses of all members from one order (`FormGeneration`), and then of two members without a link
the one with the higher rank dials. Jobs of fixed size, elastic jobs and Horovod's process sets connect in this way.
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
"""For the links of one generation. The other ends were heard of a moment ago."""
ENDED_GRACE_S = 0.5
"""How long a collective may continue in a generation that has ended. As a rule the links reveal the loss at once, with
more details."""


class NotFormedError(PhalanxError):
    """The links of a generation could not be established: one of its members was lost meanwhile."""


class MemberLinks:
    """See the top of the file. Implements the listener's `Service`.

    Args:
        identity: this process.
        purpose: of the links.

    Attributes:
        membership: the present generation; before the first one, a world of this process alone.
    """

    def __init__(self, identity: TaskIdentity, purpose: str = MESH):
        self._identity = identity
        self._purpose = purpose
        self.membership = Membership(0, 0, (identity.description.as_member(0),))
        # Protects `_arrived`, `_ended` and the exchange of `membership`. Notified when one of them changes.
        self._changed = threading.Condition()
        # Links that others have opened and no generation uses yet, with the generation that they are for.
        self._arrived: dict[str, tuple[bytes, Link]] = {}
        self._ended = 0  # the last generation that has ended
        # Links in use, by incarnation; they belong to the thread that forms generations, as does the next attribute.
        self._links: dict[str, Link] = {}
        self._unreachable: set[str] = set()  # incarnations, since `take_unreachable`

    # See `transport.listener.Service`.

    def admit(self, hello: Hello) -> Welcome:
        del hello  # it knows the secret; whether it is a member is decided by the coordinator
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        with self._changed:
            _, former = self._arrived.get(hello.incarnation, (b"", None))
            self._arrived[hello.incarnation] = hello.details, link
            self._changed.notify_all()
        if former is not None:
            former.close()

    # Generations.

    def form(self, order: FormGeneration) -> None:
        """Connect to all members of a generation. Of two members without a link, the one with the higher rank dials.

        Raises: NotFormedError if a member cannot be reached or the generation has already ended.
        """
        # Members cannot wait for each other in a circle: a link is adopted in the listener's thread of the one dialled.
        self.dial(order)
        self.complete(order)

    def dial(self, order: FormGeneration) -> None:
        """The first half of `form`: connect to the members of lower rank."""
        self._drop_unusable(order)
        deadline = time.monotonic() + LINK_UP_S
        for address in order.members[: self._rank(order)]:
            if address.incarnation not in self._links:
                self._links[address.incarnation] = self._open_link(address, order.generation, deadline)

    def complete(self, order: FormGeneration) -> None:
        """The second half of `form`: wait for the links of the members of higher rank."""
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
            # Decided and exchanged at once: afterwards `generation_ended` finds this membership and sets its end.
            if self._ended >= order.generation:
                membership.state.abort_at = time.monotonic()
            self.membership = membership

    def generation_ended(self, generation: int) -> None:
        """Stop waiting in this generation, for links or in a collective. May be called from any thread."""
        with self._changed:
            self._ended = max(self._ended, generation)  # the chief hears of each lost task in a thread of its own
            if self.membership.generation == generation:
                self.membership.state.abort_at = time.monotonic() + ENDED_GRACE_S
            self._changed.notify_all()

    def take_unreachable(self) -> list[str]:
        """The incarnations of members that could not be reached or did not answer since the last call."""
        state = self.membership.state
        found = self._unreachable | {self.membership.members[rank].incarnation for rank in state.unresponsive}
        self._unreachable = set()
        state.unresponsive.clear()
        return sorted(found)

    @property
    def all(self) -> list[Link]:
        return list(self._links.values())

    def close(self) -> None:
        with self._changed:
            arrived = [link for _, link in self._arrived.values()]
        for link in (*self._links.values(), *arrived):
            link.close()

    def _rank(self, order: FormGeneration) -> Rank:
        me = self._identity.description.incarnation
        return next(rank for rank, address in enumerate(order.members) if address.incarnation == me)

    def _drop_unusable(self, order: FormGeneration) -> None:
        """Close links to former members, broken links, and closed ones: if both ends live, the network closed them."""
        self._take_over_former(order.generation - 1)
        me = self._identity.description.incarnation
        # A process that was not a member before opens new links: those that are kept may be of a former attempt.
        wanted = {address.incarnation for address in order.members if address.completed >= 0}
        wanted -= {incarnation for pair in order.broken if me in pair for incarnation in pair}
        for incarnation, link in list(self._links.items()):
            if incarnation not in wanted or link.closed or link.peer_closed():
                self._links.pop(incarnation).close()
        with self._changed:  # those of processes that were lost before they became members
            for incarnation, (_, link) in list(self._arrived.items()):
                if link.peer_closed():
                    del self._arrived[incarnation]
                    link.close()

    def _take_over_former(self, generation: int) -> None:
        """Use links of a generation that this process gave up before it had taken them: their dialers keep them, and do
        not dial again."""
        with self._changed:
            for incarnation, (details, link) in list(self._arrived.items()):
                if details == _details_of(generation):
                    del self._arrived[incarnation]
                    if (broken := self._links.get(incarnation)) is not None:  # or its other end had not dialled
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
            raise NotFormedError(f"{member.task} cannot be reached: {error}") from error
        return link

    def _await_link(self, member: MemberAddress, generation: int, deadline: float) -> Link:
        def has_arrived() -> bool:
            # A link of an earlier attempt, which the other end has given up, does not count.
            details, _ = self._arrived.get(member.incarnation, (b"", None))
            return details == _details_of(generation)

        with self._changed:
            self._changed.wait_for(
                lambda: has_arrived() or self._ended >= generation, timeout=deadline - time.monotonic()
            )
            if has_arrived():
                return self._arrived.pop(member.incarnation)[1]
            if self._ended >= generation:
                raise NotFormedError("another member of the generation was lost")
            self._unreachable.add(member.incarnation)
            raise NotFormedError(f"{member.task} did not connect")


def _details_of(generation: int) -> bytes:
    """The details of the Hello of a link that is opened for a generation."""
    return str(generation).encode()
