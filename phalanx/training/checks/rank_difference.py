"""Who is wrong where ranks differ in what must be the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from phalanx.training.replica import Replica


class RankDifference(NamedTuple):
    """Two ranks that differ: `expected` has what is right, and `rank` something else."""

    expected: int
    rank: int


def expected_rank(replica: Replica) -> int:
    """The rank that has what all should have: the lowest one that was there when the job began."""
    late = _late_ranks(replica)
    return next((rank for rank in range(replica.world_size) if rank not in late), 0)


def find_difference(values: Sequence[Any], replica: Replica) -> RankDifference | None:
    """The difference between the ranks because of which this one must raise an error; None if there is none.

    Processes that joined when the job was running must not end it. Where they alone have something else, they alone
    raise: the others lose them in their next collective, and continue.

    Args:
        values: what each rank has, in rank order; the same on all ranks.
    """
    expected = expected_rank(replica)
    different = [rank for rank, value in enumerate(values) if value != values[expected]]
    if not different:
        return None
    if not _late_ranks(replica).issuperset(different):
        return RankDifference(expected, different[0])
    return RankDifference(expected, replica.rank) if replica.rank in different else None


def _late_ranks(replica: Replica) -> frozenset[int]:
    return frozenset() if replica.elastic is None else replica.elastic.late_ranks
