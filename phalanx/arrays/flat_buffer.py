"""Arrays that lie one after the other in one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

UNIT = 64
"""Arrays begin at multiples of so many numbers: in a vector that is aligned each is, whatever its dtype."""


class FlatBuffer:
    """Where arrays of these shapes are in a vector, which is cut into so many equal parts. Its gaps are zero.

    Attributes:
        part: how many numbers a part has.
        size: how many the vector has, gaps included.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], parts: int = 1) -> None:
        self.shapes = list(shapes)
        sizes = [math.prod(shape) for shape in shapes]
        stops = list(accumulate(_rounded(size) for size in sizes))
        self._places = [(start, start + size) for start, size in zip([0, *stops], sizes, strict=False)]
        self.part_size = _rounded(-(-max(stops, default=0) // parts))
        self.size = self.part_size * parts

    def unpack(self, vector: Array) -> list[Array]:
        """The arrays in it, as views."""
        return [
            vector[start:stop].reshape(shape) for (start, stop), shape in zip(self._places, self.shapes, strict=True)
        ]

    def pack_part(self, arrays: Sequence[Array], number: int = 0) -> Array:
        """A new array of a part of the vector of these, which are of one dtype."""
        first, last = number * self.part_size, (number + 1) * self.part_size
        part = np.zeros(self.part_size, arrays[0].dtype if arrays else None)
        for array, (start, stop) in zip(arrays, self._places, strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                part[low - first : high - first] = array.reshape(-1)[low - start : high - start]
        return part


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT
