"""Who raises an error where ranks differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.training.checks.rank_comparison import RankComparison


def found(values: str, late: set[int]) -> list[tuple[int, int] | None]:
    """What each rank finds."""

    def replica(rank: int) -> Any:
        elastic = SimpleNamespace(late_joiner_ranks=frozenset(late))
        return SimpleNamespace(rank=rank, world_size=len(values), elastic=elastic)

    return [RankComparison(replica(rank)).difference(values) for rank in range(len(values))]


@pytest.mark.parametrize(
    ("values", "late", "expected"),
    [
        ("aaa", {1}, [None, None, None]),
        ("aba", set(), [(0, 1)] * 3),
        ("abc", set(), [(0, 1)] * 3),
        ("aba", {1}, [None, (0, 1), None]),
        ("baa", {0}, [(1, 0), None, None]),  # all others of the start are lost, or it became the chief
        ("bac", {0, 2}, [(1, 0), None, (1, 2)]),
        ("abb", {1}, [(0, 1)] * 3),  # another of the start differs too
        ("abb", {0, 1, 2}, [None, (0, 1), (0, 2)]),  # none of the start is left
    ],
)
def test_who_raises(values: str, late: set[int], expected: list[Any]) -> None:
    assert found(values, late) == expected


def test_in_jobs_of_fixed_size_all_raise() -> None:
    replica: Any = SimpleNamespace(rank=0, world_size=2, elastic=None)
    assert RankComparison(replica).difference("ab") == (0, 1)
