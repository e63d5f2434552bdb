"""The links between the members of an elastic job, kept from one generation to the next where they still work."""

from __future__ import annotations

import threading
import time

from phalanx.cluster.membership import Member, Membership
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.elastic.coordinator_client import LINK_UP_S
from phalanx.elastic.membership_messages import GENERATION, FormGeneration, MemberAddress
from phalanx.errors import HandshakeError, LinkClosedError, LinkTimeoutError
from phalanx.transport.address import Address
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

ENDED_GRACE_S = 0.5
"""How long a collective may continue in a generation that has ended. As a rule the links reveal the loss at once, with
more details."""


class NotFormedError(Exception):
    """The links of a generation could not be established: one of its members was lost meanwhile."""


class MemberLinks:
    """See the top of the file. Implements the listener's `Service`.

    Attributes:
        membership: the present generation; before the first one, a world of this process alone.
    """

    def __init__(self, identity: TaskIdentity):
        self._identity = identity
        me = identity.description
        self.membership = Membership(0, 0, (Member(0, me.task, me.host, me.address, me.pid),))
        # Protects `_arrived`, `_ended` and the exchange of `membership`. Notified when one of them changes.
        self._changed = threading.Condition()
        self._arrived: dict[str, Link] = {}  # links that others have opened, not used by a generation yet
        self._ended = 0  # the last generation that has ended
        self._links: dict[str, Link] = {}
        self._linked: tuple[str, ...] = ()  # incarnations of `membership`, in rank order
        self._unreachable: set[str] = set()

    # See `transport.listener.Service`.

    def admit(self, hello: Hello) -> Welcome:
        del hello  # it knows the secret; whether it is a member is decided by the coordinator
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        with self._changed:
            former = self._arrived.pop(hello.incarnation, None)
            self._arrived[hello.incarnation] = link
            self._changed.notify_all()
        if former is not None:
            former.close()

    # Generations.

    def form(self, order: FormGeneration) -> None:
        """Connect to all members of a generation. Of two members without a link, the one with the higher rank dials.

        Raises: NotFormedError if a member cannot be reached or the generation has already ended.
        """
        me = self._identity.description.incarnation
        rank = next(rank for rank, address in enumerate(order.members) if address.incarnation == me)
        self._drop_unusable(order)
        deadline = time.monotonic() + LINK_UP_S
        for other, address in enumerate(order.members):
            # A process that was not a member before opens new links: those that are kept may be of a former attempt.
            is_kept = address.incarnation in self._links and address.completed >= 0
            if other == rank or is_kept:
                continue
            if other < rank:
                self._links[address.incarnation] = self._open_link(address, deadline)
            else:
                self._links[address.incarnation] = self._await_link(address, order.generation, deadline)
        membership = Membership(
            generation=order.generation,
            rank=rank,
            members=tuple(Member(r, a.task, a.host, a.address, a.pid) for r, a in enumerate(order.members)),
            links={r: self._links[a.incarnation] for r, a in enumerate(order.members) if r != rank},
        )
        with self._changed:
            if self._ended >= order.generation:
                membership.state.abort_at = time.monotonic()
            self.membership = membership
        self._linked = tuple(address.incarnation for address in order.members)

    def generation_ended(self, generation: int) -> None:
        """Stop waiting in this generation, for links or in a collective. May be called from any thread."""
        with self._changed:
            self._ended = generation
            if self.membership.generation == generation:
                self.membership.state.abort_at = time.monotonic() + ENDED_GRACE_S
            self._changed.notify_all()

    def take_unreachable(self) -> list[str]:
        """The incarnations of members that could not be reached or did not answer since the last call."""
        state = self.membership.state
        found = self._unreachable | {self._linked[rank] for rank in state.unresponsive}
        self._unreachable = set()
        state.unresponsive.clear()
        return sorted(found)

    @property
    def all(self) -> list[Link]:
        return list(self._links.values())

    def close(self) -> None:
        for link in (*self._links.values(), *self._arrived.values()):
            link.close()

    def _drop_unusable(self, order: FormGeneration) -> None:
        """Close links to former members, broken links, and closed ones: if both ends live, the network closed them."""
        me = self._identity.description.incarnation
        wanted = {address.incarnation for address in order.members}
        wanted -= {incarnation for pair in order.broken if me in pair for incarnation in pair}
        for incarnation, link in list(self._links.items()):
            if incarnation not in wanted or link.closed or link.peer_closed():
                self._links.pop(incarnation).close()

    def _open_link(self, member: MemberAddress, deadline: float) -> Link:
        address = Address.parse(member.address, where=member.task)
        try:
            link, _ = self._identity.dial_address(address, member.task, GENERATION, deadline=deadline, bulk=True)
        except (LinkClosedError, LinkTimeoutError, HandshakeError) as error:
            self._unreachable.add(member.incarnation)
            raise NotFormedError(f"{member.task} cannot be reached: {error}") from error
        return link

    def _await_link(self, member: MemberAddress, generation: int, deadline: float) -> Link:
        def has_arrived() -> bool:
            # A link of an earlier attempt, which the other end has given up, does not count.
            link = self._arrived.get(member.incarnation)
            return link is not None and not link.peer_closed()

        with self._changed:
            self._changed.wait_for(
                lambda: has_arrived() or self._ended >= generation, timeout=deadline - time.monotonic()
            )
            if has_arrived():
                return self._arrived.pop(member.incarnation)
            if self._ended >= generation:
                raise NotFormedError("another member of the generation was lost")
            self._unreachable.add(member.incarnation)
            raise NotFormedError(f"{member.task} did not connect")
