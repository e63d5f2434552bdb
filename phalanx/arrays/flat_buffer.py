"""The layout of several arrays in one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

UNIT = 64
"""Number of elements at whose multiples arrays begin, so that all are aligned in an aligned vector of any dtype."""


class FlatBuffer:
    """Offsets of arrays in a vector. The gaps between arrays are zero.

    Args:
        shapes: Shapes of the arrays, in order.

    Attributes:
        size: Number of elements in the vector, including gaps.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = list(shapes)
        sizes = [math.prod(shape) for shape in shapes]
        stops = list(accumulate(_rounded(size) for size in sizes))
        self._places = [(start, start + size) for start, size in zip([0, *stops], sizes, strict=False)]
        self.size = stops[-1] if stops else 0

    def unpack(self, vector: Array) -> list[Array]:
        """The arrays in a vector, as views."""
        return [
            vector[start:stop].reshape(shape) for (start, stop), shape in zip(self._places, self.shapes, strict=True)
        ]

    def pack(self, arrays: Sequence[Array]) -> Array:
        """Copy all arrays, of one dtype, into a new vector."""
        vector = np.zeros(self.size, arrays[0].dtype if arrays else None)
        for array, (start, stop) in zip(arrays, self._places, strict=True):
            vector[start:stop] = array.reshape(-1)
        return vector


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT
