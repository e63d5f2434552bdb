"""Gradient accumulation: gradients that a rank keeps until the optimizer updates.

An optimizer that accumulates gradients over several steps (`gradient_accumulation_steps`) needs the gradients of the
other ranks only when it updates. Until then it receives zeros, which do not change what it has accumulated, and the
rank's gradients are summed here; they are merged with those of the update. Metric increments wait in the same way. So
between two updates only layer state, if any, is sent, and the optimizers of all ranks stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.collectives.communicator import Array


class GradientAccumulator:
    """Sums of this rank's arrays, each with a number, because not every step has a gradient for every weight. Sums are
    replaced, never changed in place."""

    def __init__(self) -> None:
        self._sums: dict[int, Array] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(
        self, numbers: Sequence[int], arrays: Sequence[Array], scales: Sequence[float], *, loss_scale: float = 1.0
    ) -> None:
        """Add `scale * array / loss_scale` to the sums of these numbers; with scale 0 an array is not read."""
        for number, array, scale in zip(numbers, arrays, scales, strict=True):
            self._sums[number] = _sum(self._sum_of(number, array), array, scale / loss_scale)

    def plus_accumulated(
        self, numbers: Sequence[int], arrays: Sequence[Array], scales: Sequence[float], *, loss_scale: float = 1.0
    ) -> list[Array]:
        """Return `scale * array` plus the sums of these numbers, which are multiplied by `loss_scale`."""
        found = []
        for number, array, scale in zip(numbers, arrays, scales, strict=True):
            total = self._sum_of(number, array)
            whole = _sum(total if loss_scale == 1.0 else total * total.dtype.type(loss_scale), array, scale)
            found.append(whole.astype(array.dtype, copy=False))
        return found

    def get(self, number: int) -> Array | None:
        """Return the sum of this number, if there is one."""
        return self._sums.get(number)

    def clear(self) -> None:
        """Discard all sums."""
        self._sums = {}

    def _sum_of(self, number: int, array: Array) -> Array:
        total = self._sums.get(number)
        return np.zeros(array.shape, _sum_dtype(array)) if total is None else total


def _sum(total: Array, array: Array, scale: float) -> Array:
    if scale == 0.0:
        return total
    # An overflow shows in the sum, as it does when the optimizer adds.
    with np.errstate(all="ignore"):
        array = array.astype(total.dtype, copy=False)
        whole: Array = total + (array if scale == 1.0 else array * total.dtype.type(scale))
        return whole


def _sum_dtype(array: Array) -> np.dtype[np.generic]:
    """Return the dtype of an array's sums: in 16-bit floats, small terms would be lost."""
    return np.dtype(np.float32) if array.dtype.itemsize <= 2 and array.dtype.kind not in "iub" else array.dtype
