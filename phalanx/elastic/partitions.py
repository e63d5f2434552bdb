"""Members that both live and cannot reach each other: which of them leave, so that the others can go on.

A member that leaves its generation says whom it waited for in vain (`Report.missing`). One of these that is dead or
stopped does not report, and the keeper knows what to do. Where both report, the network between them is at fault, and
the same generation formed again would fail again, for ever. So:

- a pair of which one complains gets a new link in the next generation: the old one may be half open;
- if that does not help, or both have waited for the other for the whole timeout, the pair is *severed*;
- of each severed pair one leaves: first the one that is in most of them, so that a minority that is cut off goes and
  the majority stays; where that is equal, one that has nothing to lose, and then the higher rank.

What has been heard counts until a collective succeeds. Nothing here knows a socket, or the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from phalanx.elastic.membership_messages import LossReport

Pair = frozenset[str]
"""Two incarnations."""

PATIENCE = 3
"""Generations in a row that came to nothing with complaints of the same pair, whatever the reasons."""


class ConnectionFailures:
    """What members have said of each other since the last collective that succeeded.

    Attributes:
        broken: the pairs that are to have a new link in the next generation.
        severed: those of which one has to go.
    """

    def __init__(self) -> None:
        self.broken: set[Pair] = set()
        self.severed: set[Pair] = set()
        self._times: Counter[Pair] = Counter()
        self._completed = -1
        self._generation = -1

    def hear(self, generation: int, reports: Mapping[str, LossReport]) -> None:
        """All members of a generation that live have reported. Once for each generation; again changes nothing."""
        if generation == self._generation:
            return
        self._generation = generation
        completed = max(report.completed for report in reports.values())
        if completed > self._completed:
            self._times.clear()
            self.broken.clear()
            self._completed = completed
        pairs = {
            frozenset((one, other))
            for one, report in reports.items()
            for other in report.missing
            if other in reports and other != one
        }
        self._times.update(pairs)
        self.severed = {
            pair
            for pair in pairs
            if pair in self.broken or self._times[pair] >= PATIENCE or all(_accuses(reports, i, pair) for i in pair)
        }
        self.broken = pairs - self.severed

    def to_link_anew(self, members: Collection[str]) -> list[tuple[str, str]]:
        """The broken pairs among the members of the next generation."""
        pairs = (sorted(pair) for pair in self.broken if pair <= set(members))
        return [(one, other) for one, other in pairs]


def choose_evictions(members: Sequence[str], severed: Collection[Pair], fresh: Collection[str]) -> list[str]:
    """Who has to go so that no severed pair is left.

    Args:
        members: in rank order.
        fresh: those that have not been given the job's state yet.
    """
    left = {pair for pair in severed if pair <= set(members)}
    gone: list[str] = []
    while left:
        complaints = Counter(incarnation for pair in left for incarnation in pair)
        # Somebody has to know the job's state.
        knowing = {i for i in members if i not in gone and i not in fresh}
        chosen = [i for i in complaints if knowing - {i}] or list(complaints)
        worst = max(chosen, key=lambda i: (complaints[i], i in fresh, members.index(i)))
        gone.append(worst)
        left = {pair for pair in left if worst not in pair}
    return gone


def _accuses(reports: Mapping[str, LossReport], one: str, pair: Pair) -> bool:
    """Whether one of a pair has waited in vain for the other for the whole timeout."""
    (other,) = pair - {one}
    return bool(reports[one].late) and other in reports[one].missing
