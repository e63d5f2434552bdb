"""Decides which processes are evicted because they are silent or stuck. Pure; see also `network_partitions`.

Processes send a heartbeat twice a second. A stopped or cut-off process does not; if it is the last member or a
candidate, no other member would notice. A member that is alive but stuck is noticed by the members that wait for it.
A straggler, which is only slow, is never evicted: `monitoring/stragglers` names it.
"""

from __future__ import annotations

import math

from phalanx.cluster.membership_messages import LossReport
from phalanx.elastic.member_table import ElasticProcess

STUCK_GRACE_S = 1.0
"""Seconds for the other waiting members to report, after one has waited for the whole timeout."""
SUSPENDED_S = 2.0
"""If two ticks are further apart, this process itself was suspended, and the silence of the others means nothing."""


class EvictionPolicy:
    """See the module docstring.

    Args:
        timeout_s: Seconds that a process may be silent, or make no progress while others wait for it.
        now: Seconds of a monotonic clock, as in all methods.
    """

    def __init__(self, timeout_s: float, now: float):
        self._timeout_s = timeout_s
        self._ticked_at = self._awake_since = now
        self._formed_at = now
        # Time at which members that have not reported are evicted; infinite while no member waits for them.
        self._overdue_at = math.inf

    def tick(self, now: float) -> None:
        if now > self._ticked_at + SUSPENDED_S:
            self._awake_since = now
        self._ticked_at = now

    def is_silent(self, process: ElasticProcess, now: float) -> bool:
        return now > max(process.last_message_at, self._awake_since) + self._timeout_s + STUCK_GRACE_S

    # The life of a generation: it is formed, and later the members report one after the other.

    def generation_formed(self, now: float) -> None:
        self._formed_at = now

    def reported(self, report: LossReport, now: float, *, is_first: bool) -> None:
        """Record that a member has left the generation and waits for the others to do so.

        Args:
            report: Report of this member.
            now: Seconds of a monotonic clock.
            is_first: Whether no other member is waiting; earlier ones may be gone.
        """
        if is_first:  # discard the deadline of an earlier generation
            self._overdue_at = math.inf
        # If the links were never established, the others have waited for them since the generation was formed.
        waiting_since = now if report.links_formed else self._formed_at
        grace_s = STUCK_GRACE_S if report.timeout_text else self._timeout_s
        self._overdue_at = min(self._overdue_at, waiting_since + self._timeout_s, now + grace_s)

    def is_overdue(self, now: float) -> bool:
        """Whether members that have not reported are stuck, because another member has waited for them too long. Until
        then, they may just be busy between two collectives."""
        return now >= self._overdue_at
