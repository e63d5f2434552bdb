"""Rows of a table: the part of a large variable that is sent if a batch uses only some rows, as in an embedding.

Pure functions. The rows of a partitioned table are in several shards. Workers count row numbers from the beginning of
the table; messages and servers count them from the beginning of the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.parameter_server.shard_placement import Shard

Array = np.ndarray[Any, Any]

ROW_NUMBER_DTYPE = np.dtype("int32")
"""Dtype of row numbers. A table with more rows would take 8 GiB for a single column."""


class TableRows(NamedTuple):
    """Some rows of a table.

    Attributes:
        numbers: Distinct row numbers, ascending.
        values: A row for each number.
    """

    numbers: Array
    values: Array


def row_numbers_in_shard(numbers: Array, shard: Shard) -> Array:
    """The row numbers, from ascending ones, that are in a shard, counted from its beginning."""
    return numbers[_slice_of_shard(numbers, shard)] - ROW_NUMBER_DTYPE.type(shard.start)


def rows_in_shard(rows: TableRows, shard: Shard) -> TableRows:
    """The rows that are in a shard, counted from its beginning."""
    return TableRows(row_numbers_in_shard(rows.numbers, shard), rows.values[_slice_of_shard(rows.numbers, shard)])


def _slice_of_shard(numbers: Array, shard: Shard) -> slice:
    first, last = np.searchsorted(numbers, (shard.start, shard.stop))
    return slice(int(first), int(last))


def weighted_sum(parts: Sequence[TableRows], weights: Sequence[float]) -> TableRows:
    """The weighted sum of tables that have these rows, and zeros elsewhere; parts of weight 0 add no rows."""
    counting = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    like = parts[0].values
    numbers = np.unique(np.concatenate([np.zeros(0, ROW_NUMBER_DTYPE), *[part.numbers for part, _ in counting]]))
    values = np.zeros((len(numbers), *like.shape[1:]), like.dtype)
    for part, weight in counting:
        # `+=` with an index array adds once per row, because the numbers of a part are distinct.
        values[np.searchsorted(numbers, part.numbers)] += part.values * like.dtype.type(weight)
    return TableRows(numbers.astype(ROW_NUMBER_DTYPE, copy=False), values)


def next_power_of_two(count: int) -> int:
    """The least power of two that is at least `count`. There are few such sizes, so compiled functions are reused."""
    return 1 << max(0, count - 1).bit_length()


def padded(rows: Array, length: int) -> Array:
    """The rows, followed by zeros up to a length."""
    result = np.zeros((length, *rows.shape[1:]), rows.dtype)
    result[: len(rows)] = rows
    return result
