"""The chief's side of the leaders' leases. The server's side, `server/leader_lease`, explains how they work."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import msgspec

from phalanx.cluster.spec import Task
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError, PhalanxError
from phalanx.parameter_server.server_messages import Acknowledged, LeaseRequest
from phalanx.parameter_server.server_protocol import LEASE_DURATION_S, LEASE_PURPOSE
from phalanx.transport.decoding import Decoder
from phalanx.transport.link import Link

LEASE_EXPIRY_S = LEASE_DURATION_S * 1.1 + 0.1
"""Seconds from a grant until the lease has certainly ended: two clocks may run at different rates."""
DIAL_TIMEOUT_S = 1.0
"""Seconds for one attempt to connect to a leader."""
RETRY_INTERVAL_S = 0.1
"""Seconds between two attempts: a leader without a lease does not answer any worker."""

_REQUESTS = Decoder(LeaseRequest)
_GRANT = msgspec.msgpack.encode(Acknowledged())


@dataclass(eq=False)
class _Grant:
    """Grant to one leader of one group.

    Attributes:
        granted_at: Monotonic time of the last grant; initially of creation: an earlier chief may have granted before.
        is_replica_lost: Value from the leader's last request.
        is_over: Set when no more leases are granted.
        lock: Held while a grant is decided, so that none follows `LeaseGrants.end`.
        link: Link to the leader; `LeaseGrants.end` closes it.
    """

    granted_at: float = field(default_factory=time.monotonic)
    is_replica_lost: bool = True
    is_over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: Link | None = None


class LeaseGrants:
    """Grants leases to the servers that lead, each in a thread.

    Args:
        me: This task, the chief.
    """

    def __init__(self, me: TaskIdentity):
        self._me = me
        self._grants: dict[int, _Grant] = {}  # each group's latest; used by the client's thread

    def begin(self, group: int, leader: Task) -> None:
        """Grant leases to this server, which leads a group from now on."""
        self.end(group)
        self._grants[group] = grant = _Grant()
        name = f"phalanx-lease-{group}"
        threading.Thread(target=self._serve, args=(group, leader, grant), name=name, daemon=True).start()

    def has_replica(self, group: int) -> bool:
        """Whether the group's replica has all updates that were answered."""
        grant = self._grants.get(group)
        return grant is not None and not grant.is_replica_lost

    def end(self, group: int) -> None:
        """Grant the leader of a group no more leases."""
        if (grant := self._grants.get(group)) is not None:
            with grant.lock:
                grant.is_over.set()
                if grant.link is not None:
                    grant.link.close()

    def wait_until_over(self, group: int) -> None:
        """Call `end`, and wait until the leader certainly may not answer any more."""
        self.end(group)
        if (grant := self._grants.get(group)) is not None:
            time.sleep(max(0.0, grant.granted_at + LEASE_EXPIRY_S - time.monotonic()))

    def close(self) -> None:
        """End all grants. Safe to call twice."""
        for group in self._grants:
            self.end(group)

    def _serve(self, group: int, leader: Task, grant: _Grant) -> None:
        while not grant.is_over.is_set():
            try:
                link, _ = self._me.dial(leader, f"{LEASE_PURPOSE}/{group}", deadline=time.monotonic() + DIAL_TIMEOUT_S)
            except PhalanxError:
                grant.is_over.wait(RETRY_INTERVAL_S)
                continue
            with grant.lock:
                grant.link = link
            try:
                self._answer(link, grant)
            except (LinkClosedError, LinkTimeoutError, FrameError):
                continue  # connect again
            finally:
                link.close()

    @staticmethod
    def _answer(link: Link, grant: _Grant) -> None:
        while True:
            request = _REQUESTS.decode(link.receive(deadline=time.monotonic() + 2 * LEASE_DURATION_S)[0])
            with grant.lock:
                if grant.is_over.is_set():
                    return
                # Before it is sent: a grant counts whether or not it arrives.
                grant.granted_at, grant.is_replica_lost = time.monotonic(), request.is_replica_lost
            link.send(_GRANT, deadline=time.monotonic() + LEASE_DURATION_S)
