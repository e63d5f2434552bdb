"""The form in which a server's shards are sent: shards that are updated as one vector are also sent as one."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from phalanx.arrays.flat_buffer import FlatBuffer

Array = np.ndarray[Any, Any]
Kind = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of an array."""


def kind_of(array: Array) -> Kind:
    return array.shape, array.dtype


def nbytes_of(kind: Kind) -> int:
    shape, dtype = kind
    return math.prod(shape) * dtype.itemsize


class ShardPacking:
    """Packs and unpacks the groups of a server's shards, except tables.

    Args:
        kinds: Kinds of the shards.
        groups: Numbers of the shards in each group, as in the server's `Updater`.
        tables: Numbers of the shards that are sent by rows; each of them is a group, after all others.

    Attributes:
        kinds: Kinds of the arrays that are sent.
    """

    def __init__(self, kinds: Sequence[Kind], groups: Sequence[tuple[int, ...]], tables: Collection[int] = ()):
        dense = [group for group in groups if group[0] not in tables]
        vectors = [FlatBuffer([kinds[number][0] for number in group]) for group in dense]
        self._vectors = [vector if len(group) > 1 else None for vector, group in zip(vectors, dense, strict=True)]
        self.kinds: tuple[Kind, ...] = tuple(
            ((vector.size,), kinds[group[0]][1]) if len(group) > 1 else kinds[group[0]]
            for vector, group in zip(vectors, dense, strict=True)
        )
        numbers = [number for group in dense for number in group]
        self._in_order = sorted(range(len(numbers)), key=numbers.__getitem__)

    def unpack(self, arrays: Sequence[Array]) -> list[Array]:
        """Views of the shards, in their order, in the arrays of the groups, which may be flat."""
        parts: list[Array] = []
        for (shape, _), vector, array in zip(self.kinds, self._vectors, arrays, strict=True):
            parts += [array.reshape(shape)] if vector is None else vector.unpack(array)
        return [parts[place] for place in self._in_order]
