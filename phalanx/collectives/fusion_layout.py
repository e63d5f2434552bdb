"""Treats many arrays as one vector: the position of each array, and how to cut the vector. All pure.

A collective sends its arrays as one long vector without building it. The vector is cut into chunks, and each chunk is a
list of pieces, each a range of one array. Concatenating 100 MB first would cost as much as the collective itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from phalanx.collectives.communicator import Array
from phalanx.collectives.reduction import DType, wire_dtype

ALIGNMENT_BYTES = 64
"""Shares of a vector start at multiples of a cache line, so that no two ranks write to the same one."""


class LayoutPiece(NamedTuple):
    """Elements `start` to `stop` of array number `array`, at `offset` in the chunk.

    `whole` means that this is the complete array, which needs no slicing.
    """

    array: int
    start: int
    stop: int
    offset: int
    whole: bool


@dataclass(frozen=True, eq=False)
class FusionLayout:
    """Arrays of one dtype as one vector.

    Attributes:
        dtype: Dtype of the arrays.
        indices: Positions of these arrays among the call's arrays.
        sizes: Sizes of the arrays in elements.
    """

    dtype: DType
    indices: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def wire(self) -> DType:
        return wire_dtype(self.dtype)

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def wire_bytes(self) -> int:
        return self.total * self.wire.itemsize

    def chunks(self, elements: int) -> list[list[LayoutPiece]]:
        """Cut the vector into chunks of up to `elements`. `LayoutPiece.array` counts the call's arrays."""
        return [
            [piece._replace(array=self.indices[piece.array]) for piece in cut(self.sizes, start, stop)]
            for start, stop in ranges(self.total, elements)
        ]


def group_by_dtype(dtypes: Sequence[DType], sizes: Sequence[int]) -> tuple[FusionLayout, ...]:
    """Return one layout per dtype, in order of first appearance. Empty arrays are left out."""
    groups: dict[DType, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        if sizes[index]:
            groups.setdefault(dtype, []).append(index)
    return tuple(
        FusionLayout(dtype, tuple(indices), tuple(sizes[index] for index in indices))
        for dtype, indices in groups.items()
    )


def cut(sizes: Sequence[int], start: int, stop: int) -> list[LayoutPiece]:
    """Return the pieces that make up elements `start` to `stop` of the concatenated arrays.

    >>> [tuple(piece)[:4] for piece in cut([3, 5], 2, 6)]
    [(0, 2, 3, 0), (1, 0, 3, 1)]
    """
    ends = list(accumulate(sizes))
    pieces: list[LayoutPiece] = []
    # The first array that ends after `start`. Arrays that end at `start`, including empty ones, have no part in it.
    index = bisect_right(ends, start)
    position = start
    while position < stop:
        begin = ends[index] - sizes[index]
        until = min(stop, ends[index])
        if until > position:
            low, high = position - begin, until - begin
            whole = low == 0 and high == sizes[index]
            pieces.append(LayoutPiece(index, low, high, position - start, whole))
        position = until
        index += 1
    return pieces


def ranges(total: int, length: int) -> list[tuple[int, int]]:
    """Split 0 to `total` into ranges of `length`; the last one may be shorter.

    >>> ranges(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    return [(start, min(start + length, total)) for start in range(0, total, length)]


def shares(total: int, count: int, itemsize: int) -> list[tuple[int, int]]:
    """Split 0 to `total` into `count` contiguous shares, cut at cache lines; the last ones may be smaller or empty.

    >>> shares(100, 3, 4)
    [(0, 48), (48, 96), (96, 100)]
    """
    step = max(1, ALIGNMENT_BYTES // itemsize)
    share = -(-total // (count * step)) * step
    bounds = [min(index * share, total) for index in range(count + 1)]
    return list(pairwise(bounds))


def byte_view(array: Array) -> memoryview:
    """Memory of a contiguous array of any shape and dtype (bfloat16 has no buffer format).

    If the array is not contiguous: memory of a copy.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def views_between(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Bytes `start` to `stop` of concatenated byte views, as views."""
    return [
        views[piece.array] if piece.whole else views[piece.array][piece.start : piece.stop]
        for piece in cut([len(view) for view in views], start, stop)
    ]
