"""The pure parts: where arrays lie in a vector, what merging computes, what a mismatch says."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.collectives import ReduceOp
from phalanx.collectives.fusion_layout import cut, group_by_dtype, ranges, shares, views_between
from phalanx.collectives.host.algorithm import copy_views
from phalanx.collectives.operation import CollectiveDescription, Operation, explain_mismatch
from phalanx.collectives.reduction import check_reducible, is_float, load, merge_rows, wire_dtype
from phalanx.errors import ConfigurationError

sizes_lists = st.lists(st.integers(0, 30), max_size=8)


@given(sizes_lists, st.integers(1, 40))
def test_chunks_cover_the_vector_once_and_in_order(sizes: list[int], length: int) -> None:
    seen = []
    for start, stop in ranges(sum(sizes), length):
        offset = 0
        for piece in cut(sizes, start, stop):
            assert piece.offset == offset
            assert piece.whole == (piece.stop - piece.start == sizes[piece.array])
            seen += [(piece.array, index) for index in range(piece.start, piece.stop)]
            offset += piece.stop - piece.start
        assert offset == stop - start
    assert seen == [(array, index) for array, size in enumerate(sizes) for index in range(size)]


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_shares_cover_the_vector_and_start_at_cache_lines(total: int, count: int, itemsize: int) -> None:
    bounds = shares(total, count, itemsize)
    assert len(bounds) == count
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    assert all(start * itemsize % 64 == 0 or start == total for start, _ in bounds)
    longest = max(stop - start for start, stop in bounds)
    assert longest * itemsize <= -(-total // count) * itemsize + 64


@given(sizes_lists, st.data())
def test_views_between_are_the_bytes_between(sizes: list[int], data: st.DataObject) -> None:
    whole = bytes(range(256))[: sum(sizes)]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    views = [memoryview(whole)[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    assert b"".join(views_between(views, start, stop)) == whole[start:stop]


@given(sizes_lists, st.lists(st.integers(0, 240), max_size=8))
def test_copy_views_does_not_care_how_either_side_is_cut(sizes: list[int], cuts: list[int]) -> None:
    total = sum(sizes)
    source = [memoryview(bytes([index + 1]) * size) for index, size in enumerate(sizes)]
    target = bytearray(total)
    bounds = [0, *sorted(min(position, total) for position in cuts), total]
    copy_views(source, [memoryview(target)[low:high] for low, high in pairwise(bounds)])
    assert bytes(target) == b"".join(source)


def test_arrays_are_grouped_by_dtype_without_the_empty_ones() -> None:
    f4, i8 = np.dtype(np.float32), np.dtype(np.int64)
    first, second = group_by_dtype([f4, i8, f4, f4], [3, 1, 0, 5])
    assert (first.dtype, first.indices, first.sizes) == (f4, (0, 3), (3, 5))
    assert (second.dtype, second.indices, second.sizes) == (i8, (1,), (1,))


def test_narrow_floats_travel_as_float32_and_all_else_as_it_is() -> None:
    for narrow in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        assert is_float(np.dtype(narrow))
        assert wire_dtype(np.dtype(narrow)) == np.float32
    for plain in (np.float32, np.float64, np.int8, np.int16, np.bool_, np.uint64):
        assert wire_dtype(np.dtype(plain)) == np.dtype(plain)
    assert not is_float(np.dtype("V2"))


@pytest.mark.parametrize("dtype", ["V4", "complex64", "U3", "M8[s]", "O", [("a", "f4")]])
def test_what_is_no_number_cannot_be_merged(dtype: object) -> None:
    with pytest.raises(ConfigurationError, match="cannot all-reduce"):
        check_reducible(np.dtype(dtype), ReduceOp.SUM)


def test_the_mean_of_integers_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"mean of int32.*Cast the array.*SUM and divide"):
        check_reducible(np.dtype(np.int32), ReduceOp.MEAN)


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_rows_are_merged_in_their_order(rows: list[list[float]], divisor: int) -> None:
    arrays = [np.array(row, np.float32) for row in rows]
    exact = arrays[0].copy()
    for array in arrays[1:]:
        exact = exact + array
    out = np.empty(3, np.float32)
    merge_rows(arrays, out, ReduceOp.SUM, divisor)
    np.testing.assert_array_equal(out, exact / np.float32(divisor))
    # In place of the first row.
    merge_rows(arrays, arrays[0], ReduceOp.SUM, divisor)
    np.testing.assert_array_equal(arrays[0], out)


def test_scale_zero_does_not_read_the_source() -> None:
    target = np.ones(2, np.float32)
    load(np.array([np.nan, np.inf], np.float16), 0.0, target)
    assert (target == 0).all()


def test_narrow_values_are_scaled_in_float32() -> None:
    target = np.empty(1, np.float32)
    load(np.array([60_000], np.float16), 10.0, target)
    assert target[0] > 500_000


# ------------------------------------------------------------------------ descriptions


def test_signatures_differ_where_descriptions_differ() -> None:
    described = [
        CollectiveDescription("all_reduce", "op=sum", ("float32 (3,)",)),
        CollectiveDescription("all_reduce", "op=max", ("float32 (3,)",)),
        CollectiveDescription("all_reduce", "op=sum", ("float32 (3,)", "float32 (3,)")),
        CollectiveDescription("barrier"),
    ]
    assert len({Operation(description).signature for description in described}) == len(described)
    assert Operation(described[0]).signature == Operation(described[0]).signature


def test_the_message_takes_the_majority_as_reference_and_names_the_others() -> None:
    usual = CollectiveDescription("all_reduce", "op=sum", ("float32 (10, 5)",))
    odd = CollectiveDescription("all_reduce", "op=sum", ("float32 (10, 4)",))
    message = explain_mismatch({0: odd, 1: usual, 2: usual, 3: CollectiveDescription("barrier")})
    assert message.startswith("all_reduce on rank 0 got float32 (10, 4) as array 0; rank 1 brought float32 (10, 5).")
    assert "Also: rank 3 called barrier()." in message


def test_the_message_of_another_number_of_arrays_says_where_they_part() -> None:
    arrays = ("float32 (3,)", "float32 (4,)", "float32 (5,)")
    message = explain_mismatch(
        {
            0: CollectiveDescription("all_reduce", "op=sum", arrays),
            1: CollectiveDescription("all_reduce", "op=sum", arrays[:2]),
        }
    )
    assert "rank 1 got 2 arrays; rank 0 brought 3" in message
    assert "first difference is at array 2" in message


def test_a_rank_that_left_without_a_word_is_named() -> None:
    message = explain_mismatch({0: CollectiveDescription("barrier"), 1: None, 2: CollectiveDescription("barrier")})
    assert "rank 1 called something else, and left or hangs" in message


def test_long_lists_of_arrays_are_cut_short() -> None:
    shown = str(CollectiveDescription("all_reduce", "op=sum", tuple(f"float32 ({n},)" for n in range(500))))
    assert len(shown) < 120
    assert "500 arrays" in shown
