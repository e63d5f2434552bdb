"""Algorithm of a rank without real peers: its values replace those of the peers, and each call is recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from phalanx.cluster.membership import Membership
from phalanx.collectives.host.algorithm import Reduction, Views, copy_views, total_bytes
from phalanx.collectives.host.single_process import SingleProcessAlgorithm
from phalanx.collectives.operation import CollectiveCall


class RecordedCall(msgspec.Struct, frozen=True):
    """One rank's contribution to a collective.

    Attributes:
        kind: One of all_reduce, broadcast, all_gather and all_to_all.
        nbytes: Size of the contribution on the wire.
        packs: Number of arrays and bytes of each dtype; empty unless this is an all-reduce.
    """

    kind: str
    nbytes: int
    packs: tuple[tuple[int, int], ...] = ()


class RecordingAlgorithm(SingleProcessAlgorithm):
    """Rank 0 of a membership without links: every collective returns at once.

    Sums have the right shapes but lack the contributions of other ranks. Discard everything computed from them.

    Attributes:
        calls: Collectives called since `reset`.
        seconds: Time spent on copies since then.
    """

    name = "recorded"

    def __init__(self, membership: Membership):
        super().__init__(membership.rank)
        self.ranks = tuple(range(membership.world_size))
        self.reset()

    def reset(self) -> None:
        """Discard the recorded calls."""
        self.calls: list[RecordedCall] = []
        self.seconds = 0.0

    def all_reduce(self, call: CollectiveCall, reduction: Reduction) -> None:
        started = time.perf_counter()
        super().all_reduce(call, reduction)
        self.seconds += time.perf_counter() - started
        packs = tuple((len(layout.indices), layout.wire_bytes) for layout in reduction.layouts)
        self.calls.append(RecordedCall("all_reduce", sum(nbytes for _, nbytes in packs), packs))

    def all_gather(self, call: CollectiveCall, parts: Sequence[Views]) -> None:
        own, sizes = parts[self.ranks.index(0)], [size for size in map(total_bytes, parts) if size]
        if len(sizes) == 1:
            self.calls.append(RecordedCall("broadcast", sizes[0]))
            return
        for views in parts:
            if views is not own:
                copy_views(own, views)
        self.calls.append(RecordedCall("all_gather", total_bytes(own)))

    def all_to_all(
        self, call: CollectiveCall, outgoing: Sequence[Views], incoming: Sequence[Views], sizes: Sequence[Sequence[int]]
    ) -> None:
        own = self.ranks.index(0)
        for views in incoming:
            copy_views(outgoing[own], views)
        self.calls.append(RecordedCall("all_to_all", sum(map(total_bytes, outgoing))))
