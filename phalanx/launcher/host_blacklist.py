"""Hosts that keep failing are set aside for a while. Plain bookkeeping, with the time as an argument.

A host is set aside when several of its workers have failed in short order, or when it cannot be reached. After a while
it is tried again, *on trial*: the next failure soon after sets it aside again, for twice as long. Horovod's
`--blacklist-cooldown-range` is the same idea.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FAILURES = 3
"""So many failures of a host's workers set it aside. One or two happen to any host: memory ran out, for example."""
WITHIN_S = 60.0
"""... if they come within this time, in seconds."""
COOLDOWN_S = (10.0, 600.0)
"""How long at first, and at most. The first is as long as a worker takes to start; the last still finds a host that was
repaired in the same hour."""


@dataclass
class _Record:
    failures: list[float] = field(default_factory=list)  # when
    times: int = 0  # set aside in a row
    until: float | None = None
    returned: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BlacklistedHost:
    """A host that is set aside: for how many more seconds, and why."""

    seconds: float
    reason: str


class HostBlacklist:
    """Args:
    cooldown_s: seconds for which a host is set aside, at first and at most.
    """

    def __init__(self, cooldown_s: tuple[float, float] = COOLDOWN_S):
        self._first_s, self._most_s = cooldown_s
        self._records: dict[str, _Record] = {}

    def failed(self, host: str, now: float) -> float | None:
        """A worker of the host has failed; for how many seconds that sets it aside, None if it does not."""
        record = self._record(host)
        if self.is_aside(host, now):
            return None  # those that still run there fail with the others
        record.failures = [when for when in record.failures if now - when < WITHIN_S] + [now]
        on_trial = record.returned is not None and now - record.returned < WITHIN_S
        if len(record.failures) < FAILURES and not on_trial:
            return None
        count = len(record.failures)
        return self._set_aside(record, now, f"{count} of its workers failed" if count > 1 else "a worker failed again")

    def unreachable(self, host: str, now: float) -> float:
        """The host was lost, or cannot be reached; for how many seconds it is set aside."""
        record = self._record(host)
        if record.until is not None and now < record.until:
            return record.until - now
        return self._set_aside(record, now, "it could not be reached")

    def is_aside(self, host: str, now: float) -> bool:
        """Whether the host is not to be used now."""
        record = self._records.get(host)
        if record is None or record.until is None:
            return False
        if now < record.until:
            return True
        record.returned, record.until = record.until, None
        record.failures.clear()
        return False

    def aside(self, now: float) -> Mapping[str, BlacklistedHost]:
        """All hosts that are not to be used now."""
        return {
            host: BlacklistedHost(record.until - now, record.reason)
            for host, record in self._records.items()
            if self.is_aside(host, now) and record.until is not None
        }

    def _record(self, host: str) -> _Record:
        return self._records.setdefault(host, _Record())

    def _set_aside(self, record: _Record, now: float, reason: str) -> float:
        if record.returned is not None and now - record.returned >= max(WITHIN_S, self._most_s):
            record.times = 0  # it has done well since
        seconds = min(self._first_s * 2.0**record.times, self._most_s)
        record.times += 1
        record.until, record.reason = now + seconds, reason
        return seconds
