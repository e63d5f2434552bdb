"""What workers and servers agree on in addition to the messages: roles, purposes of connections, reasons to refuse."""

from __future__ import annotations

from phalanx.cluster.membership import CONNECTION_CLOSED
from phalanx.errors import PeerLostError

Worker = int
"""Number of a worker."""
CHIEF_WORKER: Worker = 0

PURPOSE = "parameter-server"
"""A worker dials this, with a slash and the number of the shard group."""
LEAD = "parameter-server-lead"
"""The chief dials this after it has lost the group's leader."""
LEASE = "parameter-server-lease"
"""The chief dials this to grant the leader's lease."""
REPLICATE = "parameter-server-copy"
"""A leader dials this to keep a replica on the other server."""

NOT_LEADING = "not leading"
LEADING = "leading"

LEASE_S = 2.0
"""How long a leader may answer without a word of the chief, where there is a replica. So long an interruption of the
chief goes unnoticed; and so long workers wait after a leader was lost."""
NOTICE_AFTER_S = 5.0
"""Seconds until a wait for missing tasks is logged: importing a backend alone takes that long."""


def peer_lost(name: str, during: str, why: str = CONNECTION_CLOSED) -> PeerLostError:
    """The error that names a lost task that has no rank."""
    return PeerLostError(f"lost {name} during {during}: {why}", rank=-1, task=name, host="")
