"""The layout of several arrays in one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

UNIT = 64
"""Arrays begin at multiples of this many numbers, so that all are aligned in an aligned vector, whatever the dtype."""


class FlatBuffer:
    """Offsets of arrays in a vector that is divided into equal parts. The gaps between arrays are zero.

    Args:
        shapes: the shapes of the arrays, in order.
        parts: the number of parts.

    Attributes:
        part_size: numbers in each part.
        size: numbers in the vector, including gaps.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], parts: int = 1) -> None:
        self.shapes = list(shapes)
        sizes = [math.prod(shape) for shape in shapes]
        stops = list(accumulate(_rounded(size) for size in sizes))
        self._places = [(start, start + size) for start, size in zip([0, *stops], sizes, strict=False)]
        self.part_size = _rounded(-(-max(stops, default=0) // parts))
        self.size = self.part_size * parts

    def unpack(self, vector: Array) -> list[Array]:
        """The arrays of a vector, as views."""
        return [
            vector[start:stop].reshape(shape) for (start, stop), shape in zip(self._places, self.shapes, strict=True)
        ]

    def pack_part(self, arrays: Sequence[Array], number: int = 0) -> Array:
        """Copy one part of the vector into a new array.

        Args:
            arrays: all arrays, of one dtype.
            number: the index of the part.
        """
        first, last = number * self.part_size, (number + 1) * self.part_size
        part = np.zeros(self.part_size, arrays[0].dtype if arrays else None)
        for array, (start, stop) in zip(arrays, self._places, strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                part[low - first : high - first] = array.reshape(-1)[low - start : high - start]
        return part


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT
