"""The contract of a collective algorithm: how values travel. The communicator does everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from phalanx.cluster.membership import Rank
from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.fusion_layout import FusionLayout, byte_view
from phalanx.collectives.operation import CollectiveCall

Views = Sequence[memoryview]
"""Byte views that are sent or filled one after another."""


@dataclass(slots=True)
class Reduction:
    """An all-reduce as passed to an algorithm.

    Attributes:
        layouts: The arrays, grouped by dtype.
        inputs: Flat contiguous arrays.
        outputs: Flat contiguous arrays of the inputs' dtypes, or of their wire dtypes. They may be the inputs.
        scales: One factor per input.
        op: How to merge.
        divisor: Divisor of the merged values (for MEAN).
    """

    layouts: tuple[FusionLayout, ...]
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    scales: Sequence[float]
    op: ReduceOp
    divisor: int


class CollectiveAlgorithm(Protocol):
    """Moves values among the ranks of a group: all members of a generation, or some of them.

    Positions (the order of `parts`) count within the group. All ranks of the group call the same method with
    matching sizes. The algorithm compares `call.signature` between them and calls `Mesh.mismatch` if it differs. Sizes
    that may differ between ranks have been exchanged before.
    """

    ranks: tuple[Rank, ...]

    @property
    def name(self) -> str:
        """Description of how the last collective moved its values, for messages."""
        ...

    def all_reduce(self, call: CollectiveCall, reduction: Reduction) -> None:
        """Fill the outputs with the merged inputs."""
        ...

    def all_gather(self, call: CollectiveCall, parts: Sequence[Views]) -> None:
        """Fill `parts[p]` with the part of position p. This rank's part is already complete. With a single non-empty
        part, this is a broadcast; with none, a barrier."""
        ...

    def all_to_all(
        self, call: CollectiveCall, outgoing: Sequence[Views], incoming: Sequence[Views], sizes: Sequence[Sequence[int]]
    ) -> None:
        """Send `outgoing[p]` to position p and fill `incoming[p]` with what p sends here, including this rank itself.

        Args:
            call: The running collective.
            outgoing: One payload per position.
            incoming: Memory for one payload per position.
            sizes: `sizes[p][q]` is the number of bytes from p to q.
        """
        ...

    def fail(self) -> None:
        """Give up, and prevent other ranks from continuing as if this rank had done its part."""
        ...

    def close(self) -> None: ...


def broadcast(algorithm: CollectiveAlgorithm, call: CollectiveCall, views: Views, root: int) -> None:
    """Fill `views` with the views of position `root`."""
    algorithm.all_gather(call, [views if position == root else [] for position in range(len(algorithm.ranks))])


def exchange_sizes(
    algorithm: CollectiveAlgorithm, call: CollectiveCall, position: int, own: Sequence[int]
) -> list[list[int]]:
    """Return every rank's `own`, in rank order. All ranks pass the same number of sizes."""
    table = np.empty((len(algorithm.ranks), len(own)), np.int64)
    table[position] = own
    algorithm.all_gather(call, [[byte_view(row)] for row in table])
    return [[int(number) for number in row] for row in table]


def copy_views(source: Views, target: Views) -> None:
    """Copy byte views to views of the same total length. Their boundaries may differ."""
    position = offset = 0
    for view in source:
        start = 0
        while start < len(view):
            while offset == len(target[position]):
                position, offset = position + 1, 0
            count = min(len(view) - start, len(target[position]) - offset)
            target[position][offset : offset + count] = view[start : start + count]
            start += count
            offset += count


def total_bytes(views: Views) -> int:
    return sum(len(view) for view in views)
