"""A leader's lease: it answers the workers of its group only while the chief permits it.

The chief decides which of a group's two servers leads. A leader that is cut off from the chief cannot learn that the
chief has promoted the other server, so its right to answer expires (Gray and Cheriton 1989, "Leases"). The leader
requests the lease, and counts it from before the request; the chief counts it from its grant, which is later. So the
leader's lease always ends first by its own clock, however long a message takes.

With each request the leader reports whether its replica is lost. An update that the replica lacks is answered only
after the chief has granted such a request: from then on the chief does not promote that replica.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError
from phalanx.parameter_server.server.replication import ReplicaStream
from phalanx.parameter_server.server.service_threads import ServiceThreads
from phalanx.parameter_server.server_messages import LeaseRequest
from phalanx.parameter_server.server_protocol import LEASE_DURATION_S, NOT_LEADING
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

RENEW_INTERVAL_S = LEASE_DURATION_S / 5
"""Seconds between two requests."""

_encode = msgspec.msgpack.Encoder().encode


class LeaderLease:
    """Lease of one group, and the listener's service for the chief, which grants it.

    Args:
        chief: Name of the chief's task.
        replica: Replica of the group.
        changed: Lock of the group, which protects the lease; notified when it is granted.
        threads: Threads of the group.
        is_leading: Returns whether this server leads, as far as it knows.
    """

    def __init__(
        self,
        chief: str,
        replica: ReplicaStream,
        changed: threading.Condition,
        threads: ServiceThreads,
        is_leading: Callable[[], bool],
    ):
        self._chief = chief
        self._replica = replica
        self._changed = changed
        self._threads = threads
        self._is_leading = is_leading
        self._until = 0.0  # by the monotonic clock; 0: never granted
        self._known_losses = -1  # losses of the replica that the chief knows about

    @property
    def is_valid(self) -> bool:
        """Whether this server may answer now."""
        return time.monotonic() < self._until

    @property
    def has_lapsed(self) -> bool:
        """Whether there was a lease, and it has ended."""
        return 0.0 < self._until <= time.monotonic()

    @property
    def covers_updates(self) -> bool:
        """Whether an update that was applied here survives the loss of this server, or the chief knows that no update
        does."""
        return self._replica.is_current or self._known_losses == self._replica.losses

    def admit(self, hello: Hello) -> Welcome:
        if hello.task != self._chief or not self._is_leading():
            return Welcome(refusal=NOT_LEADING, reason="The chief grants leases, to servers that lead.")
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        self._threads.start("lease", self._renew, link)

    def _renew(self, link: Link) -> None:
        """Request the lease repeatedly, until the chief or this server ends it. Runs in a thread."""
        try:
            while not self._threads.closing.is_set() and self._is_leading():
                requested_at = time.monotonic()
                losses, is_lost = self._replica.losses, not self._replica.is_current
                link.send(_encode(LeaseRequest(is_lost)), deadline=requested_at + LEASE_DURATION_S)
                link.receive(deadline=requested_at + LEASE_DURATION_S)
                with self._changed:
                    # Not later than the chief's count: from the request, which precedes the grant. `max`, because two
                    # links may be served at once after the chief has reconnected.
                    self._until = max(self._until, requested_at + LEASE_DURATION_S)
                    self._known_losses = losses if is_lost else self._known_losses
                    self._changed.notify_all()
                self._threads.closing.wait(RENEW_INTERVAL_S)
        except (LinkClosedError, LinkTimeoutError, FrameError):
            pass  # the lease expires, and the chief reconnects if it still wants this server
        finally:
            link.close()
