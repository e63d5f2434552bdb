"""How long a peer may be silent before it counts as dead.

A dead *process* is noticed at once: the kernel closes its connections. These are for a host that is gone, or a network
that is cut, of which nothing tells. A process that is connected but takes no part is a matter of `PHALANX_TIMEOUT`.
"""

from __future__ import annotations

KEEPALIVE_IDLE_S = 10
"""Seconds of silence on an idle connection before the first keep-alive probe."""
KEEPALIVE_INTERVAL_S = 5
"""Seconds between probes."""
KEEPALIVE_PROBES = 3
"""Unanswered probes until the connection counts as dead. A bad network may lose one or two."""

SILENT_HOST_S = float(KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S)
"""Seconds without any acknowledgement, with bytes in flight, after which the peer's host counts as dead.
As long as keep-alive takes on an idle connection, and far longer than packet loss and jitter last."""

UNANSWERED_TRANSMISSIONS = 3
"""Transmissions that must be unanswered too. Silence alone proves nothing: the probes of a full window are up to
120 s apart."""
