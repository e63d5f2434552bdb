"""Gradient accumulation: what a rank keeps to itself until the optimizer updates.

An optimizer that accumulates gradients over several steps (`gradient_accumulation_steps`) needs the gradients of the
other ranks only when it updates. Until then it is given zeros, which change nothing of what it has accumulated, and the
rank's gradients are summed here; they are merged with those of the update. What metrics count waits likewise. So
between two updates nothing is sent but the state of layers that have some, and every rank's optimizer still has the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.collectives.communicator import Array
from phalanx.compression.reducer import name_of


class GradientAccumulator:
    """Sums of this rank's arrays, keyed by the shapes of those that are merged together. Sums are replaced, never
    changed in place."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Array]] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, arrays: Sequence[Array], scales: Sequence[float], *, unit: float = 1.0) -> None:
        """Add `scale * array / unit` to the sums; with scale 0 an array is not read."""
        key = _key(arrays)
        self._sums[key] = [
            _sum(total, array, scale / unit)
            for total, array, scale in zip(self._sums_of(key, arrays), arrays, scales, strict=True)
        ]

    def plus_accumulated(self, arrays: Sequence[Array], scales: Sequence[float], *, unit: float = 1.0) -> list[Array]:
        """`scale * array` plus their sums, in units of `unit`."""
        found = []
        for total, array, scale in zip(self._sums_of(_key(arrays), arrays), arrays, scales, strict=True):
            whole = _sum(total if unit == 1.0 else total * total.dtype.type(unit), array, scale)
            found.append(whole.astype(array.dtype, copy=False))
        return found

    def forget(self, arrays: Sequence[Array]) -> None:
        """The sums of such arrays have been merged."""
        self._sums.pop(_key(arrays), None)

    def only(self) -> list[Array]:
        """The sums, if all of them are merged together; else nothing."""
        return list(next(iter(self._sums.values()))) if len(self._sums) == 1 else []

    def clear(self) -> None:
        """Forget all sums."""
        self._sums = {}

    def _sums_of(self, key: str, arrays: Sequence[Array]) -> list[Array]:
        return self._sums.get(key) or [np.zeros(array.shape, _wide(array)) for array in arrays]


def _sum(total: Array, array: Array, scale: float) -> Array:
    if scale == 0.0:
        return total
    # An overflow shows in the sum, as it does where the optimizer adds.
    with np.errstate(all="ignore"):
        array = array.astype(total.dtype, copy=False)
        whole: Array = total + (array if scale == 1.0 else array * total.dtype.type(scale))
        return whole


def _key(arrays: Sequence[Array]) -> str:
    return name_of([(array.dtype.name, *array.shape) for array in arrays])


def _wide(array: Array) -> np.dtype[np.generic]:
    """The dtype of an array's sums: in 16-bit floats what is added would be lost."""
    return np.dtype(np.float32) if array.dtype.itemsize <= 2 and array.dtype.kind not in "iub" else array.dtype
