"""Who is wrong where ranks differ in what must be the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from phalanx.training.replica import Replica


class RankDifference(NamedTuple):
    """Two ranks that differ: `expected` has what is right, and `rank` something else."""

    expected: int
    rank: int


class RankComparison:
    """Compares what the ranks have. Create it before they exchange that: a collective that meets a loss returns what
    the former members had, when the ranks are those of the next membership.

    Attributes:
        expected: the rank that has what all should have: the lowest one that was there when the job began.
    """

    def __init__(self, replica: Replica) -> None:
        self._own = replica.rank
        self._late = frozenset() if replica.elastic is None else replica.elastic.late_ranks
        self.expected = next((rank for rank in range(replica.world_size) if rank not in self._late), 0)

    def difference(self, values: Sequence[Any]) -> RankDifference | None:
        """The difference because of which this rank must raise an error; None if there is none.

        Processes that joined when the job was running must not end it. Where they alone have something else, they alone
        raise: the others lose them in their next collective, and continue.

        Args:
            values: what each rank has, in rank order; the same on all ranks.
        """
        different = [rank for rank, value in enumerate(values) if value != values[self.expected]]
        if not different:
            return None
        if not self._late.issuperset(different):
            return RankDifference(self.expected, different[0])
        return RankDifference(self.expected, self._own) if self._own in different else None
