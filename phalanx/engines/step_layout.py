"""The arrays that one step merges over the ranks, and their layout in memory.

A step merges arrays of several kinds in one all-reduce. They differ in how a rank's value counts in the sum:

* Gradients, floating state (batch-norm statistics) and logged scalars count with the rank's *share* of the global
  batch, so that the sum is their mean over the samples for any shares. (Gradients still have a separate weight, because
  parameter servers handle them differently.)
* Metric counters count once (*one*): they are already sums over samples.
* Values that only the first replica has count only there (*first*).
* Extremes (*max*, *min*) are merged separately: those of metrics, and values that gradients overwrite (float8 scales).

The result is one flat buffer per dtype. Compiled code takes the flat buffers as arguments and slices them itself, which
costs less than passing many small arrays.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.arrays import allocation
from phalanx.keras_compat.global_batch.global_gradients import is_overwritten

Array = np.ndarray[Any, Any]


class MergeWeight(enum.Enum):
    """The weight of a rank's value in a merge over all ranks."""

    GRADIENT = "gradient"
    SHARE = "share"
    ONE = "one"
    FIRST = "first"
    MAX = "max"
    MIN = "min"


EXTREMES = {MergeWeight.MAX: np.maximum, MergeWeight.MIN: np.minimum}
"""Weights that are not summed, and the function that combines two ranks' values."""


def gradient_weights(variables: Sequence[Any]) -> list[MergeWeight]:
    """Return how the gradients of variables count."""
    return [MergeWeight.MAX if is_overwritten(variable) else MergeWeight.GRADIENT for variable in variables]


@dataclass(frozen=True)
class StepLayout:
    """Shapes, dtypes and weights of the arrays of one merge, in order.

    Attributes:
        owners: Ids, in this process, of the variables whose gradients are the first arrays. They distinguish the merges
            of a step with several (one per optimizer), and steps in which other weights have gradients.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    weights: tuple[MergeWeight, ...]
    owners: tuple[int, ...] = ()

    @classmethod
    def of(cls, arrays: Sequence[Any], weights: Sequence[MergeWeight], variables: Sequence[Any] = ()) -> StepLayout:
        """Return the layout of arrays (or anything with `shape` and `dtype`).

        Args:
            variables: The variables whose gradients are the first arrays.
        """
        return cls(
            tuple(tuple(int(n) for n in array.shape) for array in arrays),
            tuple(str(np.dtype(array.dtype)) for array in arrays),
            tuple(weights),
            tuple(map(id, variables)),
        )

    def select(self, indices: Sequence[int]) -> StepLayout:
        """Return the layout of some of the arrays, in that order."""
        return StepLayout(
            tuple(self.shapes[i] for i in indices),
            tuple(self.dtypes[i] for i in indices),
            tuple(self.weights[i] for i in indices),
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.dtypes, self.weights, self.owners))

    def __hash__(self) -> int:  # cached: layouts are looked up at every step
        return self._hash

    @cached_property
    def flat_dtypes(self) -> tuple[str, ...]:
        """The dtype of each flat buffer, in order of first appearance."""
        return tuple(dict.fromkeys(self.dtypes))

    @cached_property
    def _locations(self) -> tuple[tuple[int, int, int], ...]:
        """The index of each array's buffer, and its first and last element (exclusive) there."""
        ends = dict.fromkeys(self.flat_dtypes, 0)
        places = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            start = ends[dtype]
            ends[dtype] = start + math.prod(shape)
            # One buffer per dtype: a collective sums one dtype.
            places.append((self.flat_dtypes.index(dtype), start, ends[dtype]))
        return tuple(places)

    def allocate(self) -> list[Array]:
        """Allocate zeroed flat buffers, at addresses from which a backend can compute without copying them."""
        sizes = [0] * len(self.flat_dtypes)
        for buffer, _, stop in self._locations:
            sizes[buffer] = max(sizes[buffer], stop)
        return [
            allocation.zeros_aligned((size,), np.dtype(dtype))
            for size, dtype in zip(sizes, self.flat_dtypes, strict=True)
        ]

    @cached_property
    def has_extremes(self) -> bool:
        """Whether the merge includes anything but sums."""
        return any(weight in EXTREMES for weight in self.weights)

    @property
    def num_elements(self) -> int:
        """Number of elements of all arrays."""
        return sum(math.prod(shape) for shape in self.shapes)

    def unpack(self, flats: Sequence[Any]) -> list[Any]:
        """Return the arrays inside flat buffers: views of NumPy buffers, slices of traced ones."""
        return [
            flats[buffer][start:stop].reshape(shape)
            for (buffer, start, stop), shape in zip(self._locations, self.shapes, strict=True)
        ]


SMALL = 4096
"""Below this many elements, passing an array costs more than copying it into another."""
SMALL_ON_GPU = 2**16
"""The same for an array that comes from a GPU."""


def group_small_arrays(layout: StepLayout, small: int = SMALL) -> list[list[int]]:
    """Group the indices of a layout's arrays; each group is sent as one array.

    Arrays below `small` elements with equal weights form a group; each larger array is its own group. `layout.select`
    of all groups in sequence describes the same flat buffers as the layout of the joined arrays.
    """
    groups: dict[object, list[int]] = {}
    for index, (shape, dtype, weight) in enumerate(zip(layout.shapes, layout.dtypes, layout.weights, strict=True)):
        # The index is a unique key.
        key = (dtype, weight) if math.prod(shape) < small else index
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def neutral_value(array: Array, weight: MergeWeight) -> Array:
    """Return the array that a rank without samples contributes to a merge, so that it does not count.

    Its array comes from a placeholder batch. Scaling it by zero is not enough: it may hold NaN where no sample does.
    """
    if weight is MergeWeight.FIRST:
        return array
    if weight not in EXTREMES:
        return np.zeros_like(array)
    if array.dtype.kind == "b":
        return np.full_like(array, weight is MergeWeight.MIN)
    limits = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
    lowest, highest = (-math.inf, math.inf) if limits is None else (limits.min, limits.max)
    return np.full_like(array, lowest if weight is MergeWeight.MAX else highest)
