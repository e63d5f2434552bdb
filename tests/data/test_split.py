import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data import local_range
from phalanx.data.batch_split import fingerprint_of, sample_checksum, split_share
from phalanx.data.dataset_elements import ElementStructure, unpack
from phalanx.data.input_position import epoch_end
from phalanx.errors import ConfigurationError


@given(st.integers(0, 10_000), st.integers(1, 70))
def test_local_ranges_cover_the_batch_in_rank_order_and_differ_by_at_most_one(global_size, world_size):
    ranges = [local_range(global_size, rank, world_size) for rank in range(world_size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == global_size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the first ranks get the larger parts"


@given(st.integers(1, 40), st.integers(1, 9))
def test_the_shares_of_all_ranks_are_the_element(global_size, world_size):
    element = ({"a": np.arange(global_size)}, np.arange(2.0 * global_size).reshape(-1, 2), None)
    shares = [split_share(element, rank, world_size, "test", copies=False) for rank in range(world_size)]
    assert sum(share.size for share in shares) == global_size
    together = np.concatenate([share.data[1][: share.size] for share in shares])
    np.testing.assert_array_equal(together, element[1])
    assert all(share.data[2] is None for share in shares)
    assert all(len(share.data[0]["a"]) == max(share.size, 1) for share in shares)
    assert len({share.fingerprint for share in shares}) == 1


@pytest.mark.parametrize(
    ("element", "message"),
    [
        (((), None), "without any array"),
        ((np.float32(3.0).reshape(()),), r"scalar.*\.batch\(batch_size\)"),
        ((np.zeros((3, 2)), np.zeros(4)), r"different numbers of samples: \[3, 4\]"),
        ((np.zeros((0, 2)), np.zeros(0)), "batch of 0 samples"),
    ],
)
def test_what_is_no_batch_is_refused(element, message):
    with pytest.raises(ConfigurationError, match=message):
        split_share(element, 0, 2, "The test", copies=False)


@pytest.mark.parametrize(
    ("element", "form", "parts"),
    [
        (1, ElementStructure.PARTS, (1, None, None)),
        ([1, 2], ElementStructure.PARTS, (1, 2, None)),
        ((1, 2, 3), ElementStructure.PARTS, (1, 2, 3)),
        ((1,), ElementStructure.ALONE, (1, None, None)),
        ((1, None), ElementStructure.TWO_ITEMS, (1, None, None)),
        ((1, 2, None), ElementStructure.THREE_ITEMS, (1, 2, None)),
        ((1, None, 3), ElementStructure.THREE_ITEMS, (1, None, 3)),
        (((1, 2),), ElementStructure.PARTS, ((1, 2), None, None)),
        ([1, 2, 3, 4], ElementStructure.WHOLE, ((1, 2, 3, 4), None, None)),
    ],
)
def test_an_element_is_taken_apart_as_keras_does_it(element, form, parts):
    assert unpack(element) == (form, parts)


def test_a_fingerprint_sees_the_order_and_the_length():
    ordered = np.arange(100)
    assert sample_checksum(ordered) == sample_checksum(ordered.copy())
    assert sample_checksum(ordered) != sample_checksum(ordered[::-1])
    assert sample_checksum(ordered) != sample_checksum(ordered[:99])


def test_a_fingerprint_ignores_augmented_inputs_where_the_targets_tell_the_order():
    y = np.arange(8)
    assert fingerprint_of((np.zeros((8, 3)), y)) == fingerprint_of((np.ones((8, 3)), y))
    assert fingerprint_of((np.zeros((8, 3)), y)) != fingerprint_of((np.zeros((8, 3)), y[::-1]))


def test_a_fingerprint_reads_the_inputs_where_the_targets_are_all_alike():
    y = np.zeros(8)
    x = np.arange(8)
    assert fingerprint_of((x, y)) != fingerprint_of((x[::-1], y))
    assert fingerprint_of((x, None)) != fingerprint_of((x[::-1], None))
    assert fingerprint_of(x) == fingerprint_of({"x": x})


@pytest.mark.parametrize(
    ("start", "num_batches", "steps", "stop"),
    [(0, 5, None, 5), (0, None, None, None), (0, 5, 3, 3), (3, 5, 3, 5), (4, None, 2, 6), (0, 5, 9, 5)],
)
def test_an_epoch_never_runs_over_the_end_of_a_pass(start, num_batches, steps, stop):
    assert epoch_end(start, num_batches, steps) == stop
