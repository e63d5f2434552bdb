"""Temporarily blacklists hosts that keep failing. Pure bookkeeping; time is an argument.

A host is blacklisted if several of its workers fail within a short time, or if it cannot be reached. Afterwards it is
on probation: another failure soon after blacklists it again, for twice as long. Horovod's `--blacklist-cooldown-range`
works in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FAILURES = 3
"""Number of worker failures that blacklist a host. One or two happen on any host, for example for lack of memory."""
WITHIN_S = 60.0
"""Time window of these failures, in seconds."""
COOLDOWN_S = (10.0, 600.0)
"""First and longest cooldown, in seconds. The first is about the start time of a worker; with the longest, a repaired
host is used again within the hour."""


@dataclass
class _Record:
    failures: list[float] = field(default_factory=list)  # times within WITHIN_S
    times: int = 0  # consecutive cooldowns
    until: float | None = None  # None: the host may be used
    returned: float | None = None  # end of the last cooldown, where its probation begins
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BlacklistedHost:
    """The remaining seconds of a host's cooldown, and its reason."""

    seconds: float
    reason: str


class HostBlacklist:
    """The hosts that are temporarily not used.

    Args:
        cooldown_s: First and longest cooldown of a host, in seconds.
    """

    def __init__(self, cooldown_s: tuple[float, float] = COOLDOWN_S):
        self._first_s, self._longest_s = cooldown_s
        self._records: dict[str, _Record] = {}

    def worker_failed(self, host: str, now: float) -> BlacklistedHost | None:
        """Record the failure of a worker; return its host's cooldown if this blacklists the host, otherwise None."""
        record = self._record(host)
        if self.is_blacklisted(host, now):
            return None  # a remaining worker failed along with the others
        record.failures = [when for when in record.failures if now - when < WITHIN_S] + [now]
        is_on_probation = record.returned is not None and now - record.returned < WITHIN_S
        count = len(record.failures)
        if count < FAILURES and not is_on_probation:
            return None
        reason = f"{count} of its workers failed" if count > 1 else "a worker failed again"
        return BlacklistedHost(self._add(record, now, reason), reason)

    def unreachable(self, host: str, now: float) -> float:
        """Record that a host is lost or cannot be reached; return its cooldown in seconds."""
        record = self._record(host)
        if record.until is not None and now < record.until:
            return record.until - now
        return self._add(record, now, "it could not be reached")

    def is_blacklisted(self, host: str, now: float) -> bool:
        """Whether the host must not be used now."""
        record = self._records.get(host)
        if record is None or record.until is None:
            return False
        if now < record.until:
            return True
        record.returned, record.until = record.until, None
        record.failures.clear()
        return False

    def hosts(self, now: float) -> Mapping[str, BlacklistedHost]:
        """All hosts that are currently blacklisted."""
        return {
            host: BlacklistedHost(record.until - now, record.reason)
            for host, record in self._records.items()
            if self.is_blacklisted(host, now) and record.until is not None
        }

    def _record(self, host: str) -> _Record:
        return self._records.setdefault(host, _Record())

    def _add(self, record: _Record, now: float, reason: str) -> float:
        if record.returned is not None and now - record.returned >= max(WITHIN_S, self._longest_s):
            record.times = 0  # no failure since then
        seconds = min(self._first_s * 2.0**record.times, self._longest_s)
        record.times += 1
        record.until, record.reason = now + seconds, reason
        return seconds
