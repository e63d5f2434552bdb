"""Division of global batches into micro-batches, independent of the number of ranks.

The contribution of a micro-batch to a step depends only on its samples. If all contributions are summed in one fixed
order, no bit of the sum depends on which rank computed which micro-batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from phalanx.arrays.allocation import aligned_copy
from phalanx.arrays.tree import map_leaves

Array = np.ndarray[Any, Any]


class MicroBatch(NamedTuple):
    """One micro-batch of a global batch.

    Attributes:
        number: Index in the global batch; -1 for a placeholder, which contributes nothing.
        data: `(x, y, sample_weight)`.
        share: Fraction of the global batch's samples; 0 for a placeholder.
    """

    number: int
    data: tuple[Any, Any, Any]
    share: float


def micro_batch_range(size: int, count: int, rank: int, world_size: int) -> tuple[int, int]:
    """The micro-batches of a global batch that a rank computes: `start` to `stop`.

    Args:
        size: Size of the global batch. Below `count`, there is one micro-batch for each sample.
        count: Number of micro-batches in all other global batches.

    >>> [micro_batch_range(100, 24, rank, 5) for rank in range(5)]
    [(0, 4), (4, 9), (9, 14), (14, 19), (19, 24)]
    """
    # Whole micro-batches, so that none depends on the number of ranks; ranks may differ by one.
    existing = min(count, size)
    return rank * existing // world_size, (rank + 1) * existing // world_size


def sizes_of_ranks(size: int, count: int, world_size: int) -> tuple[int, ...]:
    """The number of samples in the micro-batches of each rank."""
    ranges = (micro_batch_range(size, count, rank, world_size) for rank in range(world_size))
    return tuple(_first_row(size, count, stop) - _first_row(size, count, start) for start, stop in ranges)


def cut_micro_batches(
    data: tuple[Any, Any, Any], size: int, count: int, rank: int, world_size: int
) -> tuple[MicroBatch, ...]:
    """The micro-batches of a global batch that a rank computes; a placeholder of one sample if there are none.

    Args:
        data: The global batch.
        size, count, rank, world_size: See `micro_batch_range`.
    """
    found = []
    for number in range(*micro_batch_range(size, count, rank, world_size)):
        low, high = _first_row(size, count, number), _first_row(size, count, number + 1)
        found.append(MicroBatch(number, _rows(data, low, high), (high - low) / size))
    return tuple(found) or (MicroBatch(-1, _rows(data, 0, 1), 0.0),)


def _first_row(size: int, count: int, number: int) -> int:
    """The first row of a micro-batch. Sizes differ by at most one, and the larger ones are spread evenly."""
    return number * size // min(count, size)


def _rows(data: tuple[Any, Any, Any], low: int, high: int) -> tuple[Any, Any, Any]:
    rows: tuple[Any, Any, Any] = map_leaves(lambda array: _aligned(array[low:high]), data)
    return rows


def _aligned(rows: Array) -> Array:
    """A copy with the same alignment as all others: in some libraries, rounding depends on the address of an array."""
    return aligned_copy(rows) if rows.dtype.kind in "biufc" else rows
