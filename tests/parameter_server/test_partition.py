"""How variables are cut and spread over servers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigurationError
from phalanx.parameter_server.client.placed_variables import PlacedVariables
from phalanx.parameter_server.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
from phalanx.parameter_server.shard_placement import PlacedVariable, place_shards


@pytest.mark.parametrize(
    ("partitioner", "shape", "pieces"),
    [
        (FixedShardsPartitioner(4), (10, 3), [4, 1]),
        (FixedShardsPartitioner(4), (3,), [3]),
        (FixedShardsPartitioner(4), (), []),
        (MinSizePartitioner(min_shard_bytes=120, max_shards=8), (10, 12), [4, 1]),
        (MinSizePartitioner(min_shard_bytes=120, max_shards=3), (10, 12), [3, 1]),
        (MinSizePartitioner(), (1 << 20,), [1]),
        (MaxSizePartitioner(120), (10, 12), [5, 1]),
        (MaxSizePartitioner(120, max_shards=2), (10, 12), [2, 1]),
        (MaxSizePartitioner(1), (4, 100), [4, 1]),
        (MaxSizePartitioner(120), (0, 12), [1, 1]),
    ],
)
def test_pieces_along_the_first_axis(partitioner: object, shape: tuple[int, ...], pieces: list[int]) -> None:
    assert partitioner(shape, "float32") == pieces  # type: ignore[operator]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_a_size_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"num_shards is .* whole number of at least 1"):
        FixedShardsPartitioner(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [[1, 2], [2], [0, 1], []])
def test_a_partitioner_that_cuts_otherwise_is_refused(answer: list[int]) -> None:
    with pytest.raises(ConfigurationError, match=r"variable_partitioner returned .* for `kernel` float32\[4, 4\]"):
        place_shards([PlacedVariable("kernel", (4, 4), "float32")], 2, lambda shape, dtype: answer)


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)


@given(SHAPES, st.integers(1, 5), st.integers(1, 4))
def test_every_row_is_on_one_server_and_comes_back(shapes: list[tuple[int, ...]], servers: int, pieces: int) -> None:
    variables = [PlacedVariable(f"v{i}", shape, "float32") for i, shape in enumerate(shapes)]
    placed = PlacedVariables(variables, place_shards(variables, servers, FixedShardsPartitioner(pieces)), servers)
    arrays = [np.random.default_rng(i).normal(size=shape).astype("float32") for i, shape in enumerate(shapes)]
    parts = [placed.split_into_shards(arrays, server) for server in range(servers)]
    for array, joined in zip(arrays, placed.merge_shards(parts), strict=True):
        np.testing.assert_array_equal(joined, array)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_the_fullest_server_has_at_most_a_third_more_than_it_must(sizes: list[int], servers: int) -> None:
    variables = [PlacedVariable(f"v{i}", (size,), "float32") for i, size in enumerate(sizes)]
    loads = [0] * servers
    for shard in place_shards(variables, servers):
        loads[shard.server] += shard.stop - shard.start
    at_best = max(sum(sizes) / servers, max(sizes))
    assert max(loads) <= at_best * 4 / 3 + 1 or max(loads) <= sum(sizes) / servers + max(sizes)


def test_the_placement_is_the_same_on_every_task() -> None:
    variables = [PlacedVariable(f"v{i}", (i % 3 + 1, 4), "float32") for i in range(20)]
    assert place_shards(variables, 3) == place_shards(tuple(variables), 3)
