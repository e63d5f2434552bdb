"""Partitioners, as in `tf.distribute.experimental`: number of pieces that a variable is cut into along its first axis.

A partitioner is called with a shape and a dtype and returns the number of pieces along each axis, which is 1 for all
but the first. Any function with this signature works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from phalanx.errors import ConfigurationError

Partitioner = Callable[[Sequence[int], str], Sequence[int]]
"""Maps `(shape, dtype)` to the number of pieces along each axis."""


class FixedShardsPartitioner:
    """Cuts into a fixed number of pieces, at most the length of the first axis.

    >>> FixedShardsPartitioner(3)([10, 2], "float32")
    [3, 1]
    """

    def __init__(self, num_shards: int):
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: str) -> list[int]:
        return _along_first_axis(shape, self._num_shards)


class MinSizePartitioner:
    """Cuts into as many pieces as `max_shards` allows, each of at least `min_shard_bytes`.

    >>> MinSizePartitioner(min_shard_bytes=32, max_shards=4)([10, 2], "float32")
    [2, 1]

    `bytes_per_string` is accepted as in TensorFlow; Keras variables contain no strings.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16):
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)

    def __call__(self, shape: Sequence[int], dtype: str) -> list[int]:
        return _along_first_axis(shape, min(_bytes(shape, dtype) // self._min_shard_bytes, self._max_shards))


class MaxSizePartitioner:
    """Cuts into as few pieces as possible, each of at most `max_shard_bytes`, and into at most `max_shards`.

    >>> MaxSizePartitioner(max_shard_bytes=32)([10, 2], "float32")
    [3, 1]

    `bytes_per_string` is accepted as in TensorFlow; Keras variables contain no strings.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16):
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)

    def __call__(self, shape: Sequence[int], dtype: str) -> list[int]:
        if not shape or not shape[0]:
            return [1] * len(shape)
        row_bytes = max(1, _bytes(shape, dtype) // shape[0])
        rows = max(1, self._max_shard_bytes // row_bytes)
        pieces = math.ceil(shape[0] / rows)
        return _along_first_axis(shape, min(pieces, self._max_shards or pieces))


def _along_first_axis(shape: Sequence[int], pieces: int) -> list[int]:
    if not shape:
        return []
    return [max(1, min(pieces, shape[0])), *[1] * (len(shape) - 1)]


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    return value
