"""Failure detection: the members that died, failed or left as seen by a rank, and the errors that name them.

A link may end because the peer has finished the job. It has then sent LEAVE, and the end matters only to ranks that
still need something from it. Without LEAVE, the end of a link means that the member died, even if this rank needs
nothing more from it in this collective. This rank then has `GRACE_S` to complete the collective.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from phalanx.cluster.membership import Membership, Rank
from phalanx.collectives.host.channel import Channel
from phalanx.collectives.operation import CollectiveCall
from phalanx.errors import CollectiveTimeoutError, LinkClosedError, PeerLostError, PhalanxError
from phalanx.runtime import exit_codes
from phalanx.transport.link import ALIVE_CHECK_INTERVAL_S

GRACE_S = 0.5
"""Time to complete a collective that needs nothing more from a member that just died. Its values are already in shared
memory or on their way."""

_NETWORK_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class AbortNotice(msgspec.Struct, frozen=True):
    """The payload of ABORT: why a rank failed.

    Attributes:
        reason: `lost` (a member), `timeout`, or `left` for anything else.
        text: Message of the error.
        rank: Rank of the lost member; -1 for other reasons.
    """

    reason: str
    text: str
    rank: Rank = -1

    @classmethod
    def of(cls, error: BaseException) -> AbortNotice:
        if isinstance(error, PeerLostError):
            return cls("lost", str(error), error.rank)
        if isinstance(error, CollectiveTimeoutError):
            return cls("timeout", str(error))
        return cls("left", f"{type(error).__name__}: {exit_codes.message(error)}")


class PeerFailures:
    """The failures and departures of one communicator's peers.

    Attributes:
        ended: Time at which the link of each peer ended, by `time.monotonic`. All bytes of the peer have been read.
        hung_up: Time at which each peer closed its end of the link. Earlier bytes may still be unread.
        left: Peers that have announced the end of their communicator.
    """

    def __init__(self, membership: Membership, channels: Mapping[Rank, Channel]):
        self.ended: dict[Rank, float] = {}
        self.hung_up: dict[Rank, float] = {}
        self.left: set[Rank] = set()
        self._membership = membership
        self._channels = channels
        self._reasons: dict[Rank, str] = {}  # for links that did not close normally
        self._alive_check_at = 0.0

    def begin(self, call: CollectiveCall) -> None:
        """Start watching over a collective."""
        self._alive_check_at = call.started + ALIVE_CHECK_INTERVAL_S

    def record_end(self, rank: Rank, error: LinkClosedError) -> None:
        """Record that a peer's link has ended."""
        self.ended[rank] = time.monotonic()
        self.hung_up.pop(rank, None)
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _NETWORK_ERRORS:
            self._reasons[rank] = f"{error} Its host is down, or the network between is."

    def record_hang_up(self, rank: Rank) -> None:
        """Record that a peer has closed its end of the link."""
        if rank not in self.ended:
            self.hung_up.setdefault(rank, time.monotonic())

    def check(self, call: CollectiveCall, needed: Callable[[], Collection[Rank]], now: float) -> None:
        """Raise PeerLostError if `call` cannot complete without a lost member, or if a member died a while ago.

        Args:
            call: The running collective.
            needed: Function that returns the ranks that this rank still waits for.
            now: Current time, by `time.monotonic`.
        """
        if self.ended or self.hung_up or self.left:
            wanted = needed()
            # Without those in `hung_up`: what is needed from them may still be on its way.
            for rank in (*self.ended, *self.left):
                if rank in wanted:
                    raise self._lost(rank, call)
            for rank, since in (*self.ended.items(), *self.hung_up.items()):
                if rank not in self.left and now > since + GRACE_S:
                    raise self._lost(rank, call)
        if now >= self._alive_check_at:
            self._alive_check_at = now + ALIVE_CHECK_INTERVAL_S
            self._check_hosts(call)

    def _check_hosts(self, call: CollectiveCall) -> None:
        for rank, channel in self._channels.items():
            if rank not in self.ended:
                try:
                    channel.link.check_alive()
                except LinkClosedError as error:
                    self.ended[rank] = time.monotonic()
                    self._reasons[rank] = str(error)
                    raise self._lost(rank, call) from error

    def error_of(self, rank: Rank, notice: AbortNotice, call: CollectiveCall) -> PhalanxError:
        """Return the error to raise here after `rank` failed, of the same class as there."""
        if notice.reason == "timeout":
            return CollectiveTimeoutError(f"{member_names(self._membership, [rank])} gave up: {notice.text}")
        if notice.reason == "left":
            return self._departed(rank, f"left because of its own error ({notice.text})", call)
        if notice.rank in (self._membership.rank, -1):  # this rank itself, which is alive: the link between them broke
            return self._departed(rank, "lost its connection to this process and left", call)
        member = self._membership.members[notice.rank]
        # With the message of the rank that detected the loss, which may know more than that a link ended.
        return PeerLostError(notice.text, rank=notice.rank, task=member.task, host=member.host)

    def _lost(self, rank: Rank, call: CollectiveCall) -> PeerLostError:
        if rank in self.left:
            return self._departed(rank, "closed its communicator and left", call)
        self._membership.state.unresponsive.add(rank)
        return self._membership.peer_lost_error(rank, str(call), self._reasons.get(rank, ""))

    def _departed(self, rank: Rank, what: str, call: CollectiveCall) -> PeerLostError:
        member, me = self._membership.members[rank], self._membership.local_member
        return PeerLostError(
            f"{member_names(self._membership, [rank])} {what}, while {me.task} (rank {me.rank}) was in {call}. Look at "
            f"the end of that task's output for the cause.",
            rank=rank,
            task=member.task,
            host=member.host,
        )


def member_names(membership: Membership, ranks: Collection[Rank]) -> str:
    """Describe members for messages: `worker/1 (rank 1, pid 7 on host-a) and ...`."""
    members = [membership.members[rank] for rank in ranks]
    return " and ".join(f"{each.task} (rank {each.rank}, pid {each.pid} on {each.host})" for each in members)
