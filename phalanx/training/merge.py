"""The merge of one training step: one all-reduce over everything that the ranks contribute to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.backends.layout import Layout, Weight
from phalanx.launcher import progress
from phalanx.training.replica import Replica

Array = np.ndarray[Any, Any]

# While one buffer is still read by the backend's asynchronous update, the next step writes the other.
BUFFERS = 2


class Buffers:
    """The buffers into which steps are merged, used in turn."""

    def __init__(self) -> None:
        self._rings: dict[Layout, list[tuple[list[Array], list[Array]]]] = {}

    def next(self, layout: Layout) -> tuple[list[Array], list[Array]]:
        """Flat buffers, and views of the layout's arrays in them."""
        ring = self._rings.get(layout)
        if ring is None:
            ring = self._rings[layout] = [_buffers(layout) for _ in range(BUFFERS)]
        ring.append(ring.pop(0))
        return ring[-1]


class StepMerge:
    """Merges the arrays of a step over the ranks (`backends.engine.Merge`)."""

    updates = False

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._buffers = Buffers()
        self._scales: dict[tuple[Layout, float, bool], tuple[float, ...]] = {}

    def __call__(self, layout: Layout, arrays: Sequence[Array], share: float) -> list[Array]:
        progress.enter("all_reduce")
        flats, views = self._buffers.next(layout)
        self._replica.all_reduce(arrays, scale=self._scale(layout, share), out=views)
        progress.enter("update")
        return flats

    def _scale(self, layout: Layout, share: float) -> tuple[float, ...]:
        key = (layout, share, self._replica.is_chief)
        scale = self._scales.get(key)
        if scale is None:
            first = 1.0 if self._replica.is_chief else 0.0
            # A stand-in batch (share 0) counts nowhere, not even in what is summed.
            of = {
                Weight.GRADIENT: share,
                Weight.SHARE: share,
                Weight.ONE: 1.0 if share else 0.0,
                Weight.FIRST: first,
            }
            scale = self._scales[key] = tuple(of[weight] for weight in layout.weights)
        return scale


def _buffers(layout: Layout) -> tuple[list[Array], list[Array]]:
    flats = layout.allocate()
    return flats, layout.cut(flats)
