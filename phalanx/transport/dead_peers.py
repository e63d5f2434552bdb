"""How long a peer may be silent before it counts as dead.

A dead *process* is detected at once: the kernel closes its connections. These limits are for a lost host or network,
which nothing reports. A process that is connected but does not take part is subject to `PHALANX_TIMEOUT`.
"""

from __future__ import annotations

KEEPALIVE_IDLE_S = 10
"""Seconds of silence on an idle connection before the first keep-alive probe."""
KEEPALIVE_INTERVAL_S = 5
"""Seconds between probes."""
KEEPALIVE_PROBES = 3
"""Number of unanswered probes after which the connection counts as dead. A bad network may lose one or two."""

SILENT_HOST_S = float(KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S)
"""Seconds without any acknowledgement, with bytes in flight, after which the peer's host counts as dead.
The same time as for keep-alive on an idle connection, and far longer than packet loss and jitter last."""

UNANSWERED_TRANSMISSIONS = 3
"""Number of transmissions that must be unanswered as well. Silence alone proves nothing: the probes of a full window
are up to 120 s apart."""
