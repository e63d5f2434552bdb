"""Collectives of several processes on several hosts, composed from two algorithms.

The ranks of one host form a group; the first rank of each host, its *leader*, is also in a group of leaders. A
collective runs within the hosts, then among the leaders, then within the hosts again. Hosts may have different numbers
of ranks. Each value crosses the network once per host instead of once per rank, and the network dominates the
cost: the steps within a host are an order of magnitude cheaper.

Partial sums of narrow floats stay in float32 between the steps. Values are merged in rank order within a host, then in
host order, so the bits are the same on every rank and in every run, but differ from those of a flat reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.cluster.membership import Membership
from phalanx.collectives.fusion_layout import byte_view
from phalanx.collectives.host.algorithm import CollectiveAlgorithm, Reduction, Views, broadcast
from phalanx.collectives.host.ring_algorithm import RingAlgorithm
from phalanx.collectives.operation import CollectiveCall
from phalanx.collectives.reduction import finish


class HierarchicalAlgorithm:
    """Merges over all ranks of a membership, first within and then between hosts.

    Args:
        membership: All ranks and their hosts.
        local: Algorithm of this host's ranks.
        leaders: Algorithm of the first ranks of all hosts; None on other ranks.
        whole: Algorithm of all ranks, for collectives that merge nothing.
    """

    name = "hierarchical"
    chunk_choices = RingAlgorithm.chunk_choices
    pack_choices = RingAlgorithm.pack_choices

    def __init__(
        self, membership: Membership, *, local: CollectiveAlgorithm, leaders: RingAlgorithm | None, whole: RingAlgorithm
    ):
        self.ranks = tuple(range(membership.world_size))
        self._local = local
        self._leaders = leaders
        self._whole = whole
        self._hosts = [membership.ranks_on(host) for host in membership.hosts]
        self._host = membership.hosts.index(membership.local_member.host)

    @property
    def sizes(self) -> tuple[int, int]:
        """See `TunableAlgorithm.sizes`: the sizes of the leaders' ring. All rings start with the same sizes."""
        return self._whole.sizes

    def set_sizes(self, chunk_bytes: int, pack_bytes: int) -> None:
        """See `TunableAlgorithm.set_sizes`. Applies between hosts; nothing changes within a host."""
        if self._leaders is not None:
            self._leaders.set_sizes(chunk_bytes, pack_bytes)

    def all_reduce(self, call: CollectiveCall, reduction: Reduction) -> None:
        partial = list(reduction.outputs)  # sums of one host, in the wire dtype until all hosts are merged
        for layout in reduction.layouts:
            for index in layout.indices:
                if partial[index].dtype != layout.wire:
                    partial[index] = np.empty(partial[index].size, layout.wire)
        ones = [1.0] * len(partial)
        # Scaled here, while each rank's values are separate; divided once, below, by the number of all ranks.
        self._local.all_reduce(
            call,
            Reduction(reduction.layouts, reduction.inputs, partial, reduction.scales, reduction.op, divisor=1),
        )
        if self._leaders is not None:
            self._leaders.all_reduce(
                call, Reduction(reduction.layouts, partial, partial, ones, reduction.op, reduction.divisor)
            )
        used = [partial[index] for layout in reduction.layouts for index in layout.indices]
        # The leader, the first rank of its host, has position 0 in the host's group.
        broadcast(self._local, call, [byte_view(array) for array in used], 0)
        for merged, out in zip(partial, reduction.outputs, strict=True):
            finish(merged, out)

    def all_gather(self, call: CollectiveCall, parts: Sequence[Views]) -> None:
        self._local.all_gather(call, [parts[rank] for rank in self._local.ranks])
        by_host = [[view for rank in ranks for view in parts[rank]] for ranks in self._hosts]
        if self._leaders is not None:
            self._leaders.all_gather(call, by_host)
        others = [view for host, views in enumerate(by_host) if host != self._host for view in views]
        # Even if there is nothing new for this host: its ranks learn that the leaders have met.
        broadcast(self._local, call, others, 0)

    def all_to_all(
        self, call: CollectiveCall, outgoing: Sequence[Views], incoming: Sequence[Views], sizes: Sequence[Sequence[int]]
    ) -> None:
        self._whole.all_to_all(call, outgoing, incoming, sizes)

    def fail(self) -> None:
        self._local.fail()

    def close(self) -> None:
        self._local.close()
        if self._leaders is not None:
            self._leaders.close()
        self._whole.close()
