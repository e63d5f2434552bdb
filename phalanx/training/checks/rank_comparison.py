"""Comparison of ranks: which one is wrong if they differ in what must be equal on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from phalanx.training.replica import Replica


class RankDifference(NamedTuple):
    """Two ranks that differ: `reference_rank` has the right value, and `rank` a different one."""

    reference_rank: int
    rank: int


class RankComparison:
    """Comparison of the ranks' values. Create it before they exchange them: a collective that meets a loss returns the
    former members' values, when the ranks are already those of the next membership.

    Attributes:
        reference_rank: The rank whose value is right: the lowest one that was there when the job began.
    """

    def __init__(self, replica: Replica) -> None:
        self._rank = replica.rank
        self._late = frozenset() if replica.elastic is None else replica.elastic.late_joiner_ranks
        self.reference_rank = next((rank for rank in range(replica.world_size) if rank not in self._late), 0)

    def difference(self, values: Sequence[Any]) -> RankDifference | None:
        """Return the difference for which this rank must raise an error; None if there is none.

        Processes that joined a running job must not end it. If only their values differ, only they raise: the others
        lose them in the next collective, and continue.

        Args:
            values: Value of each rank, in rank order; the same on all ranks.
        """
        different = [rank for rank, value in enumerate(values) if value != values[self.reference_rank]]
        if not different:
            return None
        if not self._late.issuperset(different):
            return RankDifference(self.reference_rank, different[0])
        return RankDifference(self.reference_rank, self._rank) if self._rank in different else None
