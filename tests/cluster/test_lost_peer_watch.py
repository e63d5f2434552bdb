"""The end of a member's link is its loss, until the members leave together."""

from __future__ import annotations

import queue
import socket

from phalanx.cluster.lost_peer_watch import LostPeerWatch
from phalanx.cluster.membership import Member, Membership
from phalanx.errors import PeerLostError
from phalanx.transport.link import Link

BOUND_S = 30.0


def membership_of(world_size: int) -> tuple[Membership, list[socket.socket]]:
    """Rank 0 of as many members, and the other ends of its links."""
    members = tuple(Member(rank, f"worker/{rank}", "host", f"127.0.0.1:{rank + 1}", 7) for rank in range(world_size))
    pairs = [socket.socketpair() for _ in range(world_size - 1)]
    links = {rank: Link(own, f"worker/{rank}") for rank, (own, _) in enumerate(pairs, start=1)}
    return Membership(1, 0, members, links), [other for _, other in pairs]


def test_the_first_link_that_ends_is_reported_once_and_named() -> None:
    membership, others = membership_of(3)
    losses: queue.Queue[PeerLostError] = queue.Queue()
    watch = LostPeerWatch(membership, "a long computation", losses.put)
    watch.start()
    others[0].send(b"what a collective sends")  # is for others to read
    assert watch.wait_for_loss(0.0) is None
    others[1].close()
    loss = losses.get(timeout=BOUND_S)
    assert (loss.rank, loss.task) == (2, "worker/2")
    assert "during a long computation" in str(loss)
    assert watch.wait_for_loss(0.0) is loss
    others[0].close()
    watch.close()
    assert losses.empty()


def test_who_leaves_with_the_others_is_not_lost() -> None:
    membership, others = membership_of(2)
    losses: queue.Queue[PeerLostError] = queue.Queue()
    watch = LostPeerWatch(membership, "a long computation", losses.put)
    watch.start()
    watch.close()
    others[0].close()
    assert watch.wait_for_loss(0.0) is None
    assert losses.empty()
