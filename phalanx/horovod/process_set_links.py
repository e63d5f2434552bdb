"""Links among some members of a job, for a process set.

A link serves one communicator at a time, so a process set has its own links in addition to those of the whole job. Each
member registers a purpose on its port and dials the members of lower rank. Between these steps the whole job
synchronizes: all have registered before any member dials, and dialled before any member completes. A lost member is
noticed there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from phalanx.cluster.membership import Membership, Rank
from phalanx.cluster.node import Node
from phalanx.elastic.elastic_node import ElasticNode
from phalanx.errors import RendezvousError
from phalanx.transport.address import Address
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

REFUSED = "not a member"
ARRIVAL_S = 30.0
"""For a link that the other end has already established: the listener only has to deliver it."""


class LinkOffer:
    """Accepts the links of members with higher ranks (a `transport.listener.Service`).

    Args:
        node: this process's place in the job.
        purpose: identifies the process set.
        ranks: the ranks of its members in the job, in order; this process is one of them.
    """

    def __init__(self, node: Node | ElasticNode, purpose: str, ranks: Sequence[Rank]):
        self._node = node
        self._purpose = purpose
        self._ranks = tuple(ranks)
        self._members = [node.membership.members[rank] for rank in ranks]
        self._own = self._ranks.index(node.membership.rank)
        self._arrived = threading.Condition()  # protects `_links`; notified when one arrives
        self._links: dict[int, Link] = {}
        if len(ranks) > 1:
            assert node.listener is not None, "a job of several processes has a port"
            node.listener.register(purpose, self)

    def admit(self, hello: Hello) -> Welcome:
        """See `Service.admit`."""
        if any(member.task == hello.task for member in self._members[self._own + 1 :]):
            return Welcome(refusal="", reason="")
        return Welcome(refusal=REFUSED, reason=f"{hello.task} is not a member of higher rank of this process set")

    def adopt(self, hello: Hello, link: Link) -> None:
        """See `Service.adopt`."""
        position = next(i for i, member in enumerate(self._members) if member.task == hello.task)
        with self._arrived:
            self._links[position] = link
            self._arrived.notify_all()

    def dial(self, timeout_s: float) -> None:
        """Dial the members of lower rank. Call this once all members have created their offers.

        Args:
            timeout_s: for all connections together.

        Raises: as `transport.dial.dial`.
        """
        deadline = time.monotonic() + timeout_s
        for position, member in enumerate(self._members[: self._own]):
            address = Address.parse(member.address, where=member.task)
            link, _ = self._node.identity.dial_address(
                address, member.task, self._purpose, deadline=deadline, bulk=True
            )
            with self._arrived:
                self._links[position] = link

    def complete(self) -> Membership:
        """The process set as a membership, with ranks counted within it. Call this once all members have dialled.

        Raises: RendezvousError if the link of a member is missing.
        """
        expected = set(range(len(self._members))) - {self._own}
        with self._arrived:
            self._arrived.wait_for(lambda: expected <= self._links.keys(), timeout=ARRIVAL_S)
            links = dict(sorted(self._links.items()))
            missing = expected - links.keys()
            if not missing:
                self._links = {}  # the membership closes them
        if missing:
            names = ", ".join(self._members[position].task for position in sorted(missing))
            raise RendezvousError(f"{names} did not connect to the process set {list(self._ranks)}.")
        members = tuple(replace(member, rank=position) for position, member in enumerate(self._members))
        return Membership(self._node.membership.generation, self._own, members, links)

    def close(self) -> None:
        """Withdraw the offer, and close the links that do not belong to a membership."""
        if self._node.listener is not None:
            self._node.listener.unregister(self._purpose)
        for link in self._links.values():
            link.close()
