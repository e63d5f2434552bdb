"""Arrays one after the other in a vector."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.arrays.flat_buffer import UNIT, FlatBuffer


def _shapes(smallest: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    return st.lists(st.lists(st.integers(smallest, 9), max_size=3).map(tuple), max_size=6)


@given(_shapes(0))
def test_arrays_are_packed_and_unpacked(shapes: list[tuple[int, ...]]) -> None:
    vector = FlatBuffer(shapes)
    arrays = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * n for n, shape in enumerate(shapes)]
    whole = vector.pack(arrays)
    assert whole.shape == (vector.size,)
    for array, view in zip(arrays, vector.unpack(whole), strict=True):
        np.testing.assert_array_equal(view, array)
    assert np.count_nonzero(whole) == sum(np.count_nonzero(array) for array in arrays)


@given(_shapes(1))
def test_arrays_begin_where_xla_need_not_copy_them(shapes: list[tuple[int, ...]]) -> None:
    vector = FlatBuffer(shapes)
    flat = np.zeros(vector.size, np.float32)
    starts = [view.__array_interface__["data"][0] - flat.__array_interface__["data"][0] for view in vector.unpack(flat)]
    assert all(start % (UNIT * flat.itemsize) == 0 for start in starts)
    for (before, after), shape in zip(pairwise(starts), shapes, strict=False):
        assert after - before >= np.prod(shape) * flat.itemsize
