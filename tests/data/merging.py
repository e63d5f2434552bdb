"""Every rank's view of an input in one process, and the ranks' shares put together again."""

from __future__ import annotations

import numpy as np

from phalanx import data as inputs
from phalanx.arrays.tree import leaves
from phalanx.data import LocalBatch, ShardedInput
from phalanx.data.input_request import InputRequest

WORLD_SIZES = (1, 2, 3, 5)
SEED = 11


def shard_input(*arguments, **fields) -> ShardedInput:
    """What a rank reads of an input; see `InputRequest`."""
    return inputs.shard_input(InputRequest(*arguments, **fields))


def ranks_of(make, world_size: int, **options) -> list[ShardedInput]:
    """`make()` gives each rank its own (x, y, sample_weight), as each process makes its own."""
    return [shard_input(*make(), rank=rank, world_size=world_size, seed=SEED, **options) for rank in range(world_size)]


def as_tuple(data):
    return data if isinstance(data, tuple) else (data,)


def merge(parts: list[LocalBatch]):
    """The global batch that the ranks' local batches make in rank order, checking what they say of it."""
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert {part.global_size for part in parts} == {sum(sizes)}
    columns = []
    for column in zip(*(leaves(part.data) for part in parts), strict=True):
        for array, size in zip(column, sizes, strict=True):
            assert isinstance(array, np.ndarray)
            assert len(array) == max(size, 1), "an empty share holds one stand-in sample"
            assert array.shape[1:] == column[0].shape[1:]
            assert array.dtype == column[0].dtype
        columns.append(np.concatenate([array[:size] for array, size in zip(column, sizes, strict=True)]))
    return columns


def merged_epoch(ranks: list[ShardedInput], index: int):
    """The global batches of one epoch; checks that all ranks have as many."""
    return [merge(list(parts)) for parts in zip(*(rank.epoch(index) for rank in ranks), strict=True)]


def assert_same_batches(got, expected):
    expected = [leaves(batch) for batch in expected]
    assert len(got) == len(expected)
    for got_batch, expected_batch in zip(got, expected, strict=True):
        assert len(got_batch) == len(expected_batch)
        for a, b in zip(got_batch, expected_batch, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


def keras_batches(x, y=None, sample_weight=None, **options):
    """What Keras's own adapter yields for the same input."""
    from keras.src.trainers.data_adapters import get_data_adapter

    adapter = get_data_adapter(x, y, sample_weight, **options)
    adapter.on_epoch_begin()
    batches = list(adapter.get_numpy_iterator())
    adapter.on_epoch_end()
    return batches
