"""A sum in a fixed tree has the same bits, however the summands are divided."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from phalanx.arrays.tree_sum import TreeSum, nodes_between
from phalanx.data.micro_batches import cut_micro_batches, micro_batch_range, sizes_of_ranks


def total_of(values: np.ndarray, bounds: list[int]) -> list[np.ndarray]:
    """The total if ranks have the values between two bounds each, and exchange their nodes."""
    whole = TreeSum([np.maximum])
    for start, stop in itertools.pairwise(bounds):
        own = TreeSum([np.maximum])
        for index in range(start, stop):
            own.add(index, [values[index].copy(), values[index].copy()])
        expected = nodes_between(start, stop)
        assert len(own.nodes()) == len(expected)
        for (level, index), node in zip(expected, own.nodes(), strict=True):
            whole.add(index, node, level)
    return whole.total()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 24, 25])
def test_the_bits_do_not_depend_on_who_has_which_summand(count: int) -> None:
    random = np.random.default_rng(count)
    values = (random.normal(size=(count, 5)) * 10.0 ** random.integers(-6, 6, size=(count, 5))).astype("float32")
    expected = total_of(values, [0, count])
    np.testing.assert_allclose(expected[1], values.astype("float64").sum(0), rtol=1e-4, atol=1.0)
    np.testing.assert_array_equal(expected[0], values.max(0))
    for ranks in range(1, 10):
        bounds = [micro_batch_range(1000, count, rank, ranks)[0] for rank in range(ranks)] + [count]
        for one, other in zip(total_of(values, bounds), expected, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("size", [1, 5, 24, 31, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 30])
def test_all_ranks_together_have_every_sample_once(size: int, world_size: int) -> None:
    data = (np.arange(size), None, {"a": np.arange(size) * 2})
    batches = [cut_micro_batches(data, size, 24, rank, world_size) for rank in range(world_size)]
    real = [micro for of_rank in batches for micro in of_rank if micro.share]
    assert [micro.number for micro in real] == list(range(min(size, 24)))
    assert np.concatenate([micro.data[0] for micro in real]).tolist() == list(range(size))
    assert np.concatenate([micro.data[2]["a"] for micro in real]).tolist() == list(range(0, 2 * size, 2))
    sizes = tuple(sum(len(micro.data[0]) for micro in of_rank if micro.share) for of_rank in batches)
    assert sizes == sizes_of_ranks(size, 24, world_size)
    assert max(sizes) - min(sizes) <= max(2, size // 10)
    assert all(len(of_rank) == 1 for of_rank in batches if not of_rank[0].share)
