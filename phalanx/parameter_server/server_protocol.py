"""Protocol of workers and servers in addition to the messages: roles, purposes of connections, reasons for refusal."""

from __future__ import annotations

from phalanx.cluster.membership import CONNECTION_CLOSED
from phalanx.errors import PeerLostError

Worker = int
"""Number of a worker."""
CHIEF_WORKER: Worker = 0

GROUP_PURPOSE = "parameter-server"
"""Purpose of workers' connections, followed by a slash and the number of the shard group."""
PROMOTE_PURPOSE = "parameter-server-lead"
"""Purpose of the chief's connection after it has lost the group's leader."""
LEASE_PURPOSE = "parameter-server-lease"
"""Purpose of the chief's connection that grants the leader's lease."""
REPLICATE_PURPOSE = "parameter-server-copy"
"""Purpose of a leader's connection that keeps a replica on the other server."""

NOT_LEADING = "not leading"
LEADING = "leading"

LEASE_DURATION_S = 2.0
"""Seconds that a leader may answer without hearing from the chief, if there is a replica. An interruption of the chief
goes unnoticed for that long, and workers wait that long after a leader is lost."""
NOTICE_AFTER_S = 5.0
"""Seconds until a wait for missing tasks is logged. Importing a backend alone takes that long."""


def peer_lost(name: str, during: str, why: str = CONNECTION_CLOSED) -> PeerLostError:
    """The error for a lost task that has no rank."""
    return PeerLostError(f"lost {name} during {during}: {why}", rank=-1, task=name, host="")
