"""Rows of a table: what of a large variable travels where only some of it is used, as in an embedding.

Pure functions. The rows of a table lie in several shards where it is cut; row numbers are counted from the beginning of
the table on a worker, and of the shard on its way and on a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.parameter_server.shard_placement import Shard

Array = np.ndarray[Any, Any]

NUMBER = np.dtype("int32")
"""Of row numbers. A table of more rows would take 8 GiB for a single column."""


class TableRows(NamedTuple):
    """Some rows of a table.

    Attributes:
        numbers: which; ascending, each once.
        values: a row for each.
    """

    numbers: Array
    values: Array


def of_shard(numbers: Array, shard: Shard) -> slice:
    """Where the row numbers that lie in a shard stand among ascending ones."""
    first, last = np.searchsorted(numbers, (shard.start, shard.stop))
    return slice(int(first), int(last))


def cut(rows: TableRows, shard: Shard) -> TableRows:
    """Those of the rows that lie in a shard, counted from its beginning."""
    part = of_shard(rows.numbers, shard)
    return TableRows(rows.numbers[part] - NUMBER.type(shard.start), rows.values[part])


def weighted_sum(parts: Sequence[TableRows], weights: Sequence[float]) -> TableRows:
    """The sum of whole tables that have these rows and else zeros; the rows of what has weight 0 are not touched."""
    counting = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    like = parts[0].values
    numbers = np.unique(np.concatenate([np.zeros(0, NUMBER), *[part.numbers for part, _ in counting]]))
    values = np.zeros((len(numbers), *like.shape[1:]), like.dtype)
    for part, weight in counting:
        values[np.searchsorted(numbers, part.numbers)] += part.values * like.dtype.type(weight)
    return TableRows(numbers.astype(NUMBER, copy=False), values)


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`: of such sizes there are few, so functions compiled for them
    serve many steps."""
    return 1 << max(0, count - 1).bit_length()


def padded(rows: Array, length: int) -> Array:
    """The rows with zeros after them."""
    result = np.zeros((length, *rows.shape[1:]), rows.dtype)
    result[: len(rows)] = rows
    return result
