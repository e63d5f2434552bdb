"""Algorithm for a job with one process: copies values."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cluster.membership import Rank
from phalanx.collectives.host.algorithm import Reduction, Views, copy_views
from phalanx.collectives.operation import CollectiveCall
from phalanx.collectives.reduction import load


class SingleProcessAlgorithm:
    """A group of one."""

    name = "copy"

    def __init__(self, rank: Rank):
        self.ranks: tuple[Rank, ...] = (rank,)

    def all_reduce(self, call: CollectiveCall, reduction: Reduction) -> None:
        for layout in reduction.layouts:
            for index in layout.indices:
                source, target = reduction.inputs[index], reduction.outputs[index]
                scale = reduction.scales[index]
                if scale in (0.0, 1.0) or target.dtype == layout.wire:
                    load(source, scale, target)
                else:
                    target[...] = source.astype(layout.wire) * scale

    def all_gather(self, call: CollectiveCall, parts: Sequence[Views]) -> None:
        pass

    def all_to_all(
        self, call: CollectiveCall, outgoing: Sequence[Views], incoming: Sequence[Views], sizes: Sequence[Sequence[int]]
    ) -> None:
        copy_views(outgoing[0], incoming[0])

    def fail(self) -> None:
        pass

    def close(self) -> None:
        pass
