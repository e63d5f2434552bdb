"""Decides which members to evict when live members cannot reach each other.

A member that leaves its generation reports which members did not answer (`LossReport.unreachable`). A dead or stopped
member never reports, and the coordinator evicts it. If both members of a pair report, the network between them is at
fault, and forming the same generation again would fail again. Therefore:

- If one member of a pair complains, the pair replaces its link in the next generation: the old one may be half open.
- If that does not help, or both have waited for each other for the whole timeout, the pair is *severed*.
- One member of every severed pair is evicted: first the one that occurs in most pairs, so that a partitioned minority
  leaves and the majority stays; on a tie the one that still needs the job's state, then the higher rank.

Complaints are kept until a collective succeeds. This module is pure: no sockets, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from phalanx.cluster.membership_messages import LossReport

Pair = frozenset[str]
"""Two incarnations."""

MAX_COMPLAINTS = 3
"""Number of consecutive failed generations with a complaint about a pair, for whatever reason, after which it counts as
severed."""


class ConnectionFailures:
    """Complaints of members about each other since the last successful collective.

    Attributes:
        broken: Pairs that must replace their link in the next generation.
        severed: Pairs with one member that must be evicted.
    """

    def __init__(self) -> None:
        self.broken: set[Pair] = set()
        self.severed: set[Pair] = set()
        self._complaints: Counter[Pair] = Counter()
        self._completed = -1
        self._generation = -1

    def record(self, generation: int, reports: Mapping[str, LossReport]) -> None:
        """Evaluate the reports of all live members of a generation. Idempotent for each generation."""
        if generation == self._generation:  # called again after each eviction; a complaint counts once
            return
        self._generation = generation
        completed = max(report.completed for report in reports.values())
        if completed > self._completed:
            self._complaints.clear()
            self.broken.clear()
            self._completed = completed
        pairs = {
            frozenset((one, other))
            for one, report in reports.items()
            for other in report.unreachable
            if other in reports and other != one  # a pair with a lost member is not broken
        }
        self._complaints.update(pairs)
        self.severed = {
            pair
            for pair in pairs
            if pair in self.broken
            or self._complaints[pair] >= MAX_COMPLAINTS
            or all(_has_timed_out(reports, i, pair) for i in pair)
        }
        self.broken = pairs - self.severed

    def evictions(self, generation: int, members: Sequence[str], reports: Mapping[str, LossReport]) -> list[str]:
        """Choose the members to evict because they and other live members cannot reach each other.

        Args:
            generation: The generation that has ended.
            members: Incarnations of its live members, in rank order; all have reported.
            reports: Reports of these members.
        """
        self.record(generation, reports)
        needing_state = [incarnation for incarnation, report in reports.items() if report.needs_state]
        return choose_evictions(members, self.severed, needing_state)

    def broken_links(self, members: Collection[str]) -> list[tuple[str, str]]:
        """Broken pairs among the members of the next generation."""
        pairs = (sorted(pair) for pair in self.broken if pair <= set(members))
        return [(one, other) for one, other in pairs]


def choose_evictions(members: Sequence[str], severed: Collection[Pair], needing_state: Collection[str]) -> list[str]:
    """Choose the members to evict so that no severed pair remains.

    Args:
        members: Incarnations of all members, in rank order.
        severed: Pairs of members that cannot reach each other.
        needing_state: Members that still need the job's state.
    """
    left = {pair for pair in severed if pair <= set(members)}
    evicted: list[str] = []
    while left:
        complaints = Counter(incarnation for pair in left for incarnation in pair)
        # At least one member that has the job's state must stay.
        informed = {i for i in members if i not in evicted and i not in needing_state}
        eligible = [i for i in complaints if informed - {i}] or list(complaints)
        worst = max(eligible, key=lambda i: (complaints[i], i in needing_state, members.index(i)))
        evicted.append(worst)
        left = {pair for pair in left if worst not in pair}
    return evicted


def _has_timed_out(reports: Mapping[str, LossReport], one: str, pair: Pair) -> bool:
    """Whether one member of a pair has waited for the other for the whole timeout."""
    (other,) = pair - {one}
    return bool(reports[one].timeout_text) and other in reports[one].unreachable
