"""Packing of arrays one after another into one flat array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.collectives.communicator import Array


def pack_into(flat: Array, arrays: Sequence[Array]) -> None:
    """Copy the arrays into the beginning of `flat`, converted to its dtype."""
    start = 0
    for array in arrays:
        flat[start : start + array.size] = array.reshape(-1)
        start += array.size


def unpack_views(flat: Array, arrays: Sequence[Array]) -> list[Array]:
    """Views of the arrays that `pack_into` copied into `flat`, with their shapes."""
    ends = np.cumsum([array.size for array in arrays])
    starts = [0, *ends[:-1]]
    return [flat[a:b].reshape(array.shape) for a, b, array in zip(starts, ends, arrays, strict=True)]
