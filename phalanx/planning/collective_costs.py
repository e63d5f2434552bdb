"""Predicts how long a collective of the host communicators takes between machines that are not available. All pure.

The formulas follow the algorithms in `collectives/host` packet by packet. A link carries `bytes_per_s` in both
directions at once, and a packet arrives after `latency_s`. The costs of this software (`SoftwareCosts`) are measured on
one machine (`collective_trial`). Each machine sends to one neighbor and receives from the other. The model does not
include switches that are too slow for all machines at once.

A *hop* is the time until the next rank can forward a packet: the transfer of its bytes, the latency, and the time that
the rank takes to wake up and merge it.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.collectives.host.recording_algorithm import RecordedCall
from phalanx.collectives.host.ring_algorithm import CHUNK_BYTES, DIRECT_BYTES, PACK_BYTES

WIRE_EFFICIENCY = 1448 / 1538
"""TCP payload as a fraction of the wire rate: Ethernet frames of 1500 bytes with timestamps, preambles and gaps
(RFC 7323, IEEE 802.3)."""


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """The network of each machine.

    Attributes:
        bytes_per_s: Payload rate in each direction.
        latency_s: One-way latency of a packet.
    """

    bytes_per_s: float
    latency_s: float

    @classmethod
    def of_ethernet(cls, bits_per_s: float, latency_s: float) -> NetworkLink:
        """Return a link with this nominal rate."""
        return cls(bits_per_s / 8 * WIRE_EFFICIENCY, latency_s)


@dataclass(frozen=True, slots=True)
class SoftwareCosts:
    """Costs in seconds of one core, as measured by `collective_trial`.

    Attributes:
        link_byte_s: Cost of encrypting, sending, receiving, decrypting and merging a byte over a link.
        pack_byte_s: Cost of packing and unpacking a byte of several arrays.
        message_s: Fixed cost of a packet.
        hop_s: Time that a waiting rank needs to forward a packet.
        local_byte_s: Cost of merging a byte of two ranks through shared memory.
    """

    link_byte_s: float
    pack_byte_s: float
    message_s: float
    hop_s: float
    local_byte_s: float


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a job: `count` machines with `workers` replicas each."""

    count: int
    workers: int = 1

    @property
    def replicas(self) -> int:
        return self.count * self.workers


@dataclass(frozen=True, slots=True)
class CollectiveCosts:
    """Predicts the duration of collectives for one kind of machine and network."""

    link: NetworkLink
    software: SoftwareCosts

    def seconds(self, call: RecordedCall, machines: Machines) -> float:
        """Duration of a collective that all ranks call at the same time."""
        if machines.replicas == 1:
            return 0.0
        if call.kind == "all_reduce":
            return self._all_reduce(call, machines)
        if call.kind == "broadcast":
            return self._broadcast(call.nbytes, machines.count) + self._through_memory(call.nbytes, machines.workers)
        if call.kind == "all_to_all":
            share = call.nbytes / machines.replicas
            return self._exchange(share, machines.replicas - 1)
        on_machine = call.nbytes * machines.workers
        whole = call.nbytes * machines.replicas
        return self._exchange(on_machine, machines.count - 1) + self._through_memory(whole, machines.workers)

    # Between machines.

    def _all_reduce(self, call: RecordedCall, machines: Machines) -> float:
        within = self._through_memory(2 * call.nbytes, machines.workers)  # merged, then broadcast
        if machines.count == 1:
            return within / 2  # no results from other machines to broadcast
        if call.nbytes <= DIRECT_BYTES:
            return within + self._exchange(call.nbytes, machines.count - 1)
        return within + sum(self._merge_dtype(arrays, nbytes, machines.count) for arrays, nbytes in call.packs)

    def _merge_dtype(self, arrays: int, nbytes: int, ranks: int) -> float:
        """Duration of `RingAlgorithm._reduce_array` or `_reduce_pack`. Packs go around the ring one after another."""
        if arrays == 1:
            return self._ring(nbytes, ranks)
        whole, rest = divmod(nbytes, PACK_BYTES)
        rings = whole * self._ring(PACK_BYTES, ranks) + (self._ring(rest, ranks) if rest else 0.0)
        return nbytes * self.software.pack_byte_s + rings

    def _ring(self, nbytes: int, ranks: int) -> float:
        """Duration of a ring: 2 (n - 1) steps. In each step, a share moves on chunk by chunk at the rate of the link or
        this software, whichever is slower. A step takes at least as long as the hop of its first chunk."""
        share = nbytes / ranks
        chunk = min(share, CHUNK_BYTES)
        step = max(share * self._byte_s(chunk), self._hop(chunk))
        return 2 * (ranks - 1) * step

    def _byte_s(self, chunk: float) -> float:
        """Seconds per byte in a stream of packets. The link and the processor work in parallel."""
        return max(1 / self.link.bytes_per_s, self.software.link_byte_s + self.software.message_s / chunk)

    def _hop(self, nbytes: float) -> float:
        link, software = self.link, self.software
        return nbytes / link.bytes_per_s + link.latency_s + software.hop_s + nbytes * software.link_byte_s

    def _exchange(self, nbytes: float, peers: int) -> float:
        """Duration of sending a packet to each peer and receiving one from each."""
        if peers == 0:
            return 0.0
        # The first packet takes a hop; the packets for the other peers queue behind it, for the link or the core.
        each = max(nbytes / self.link.bytes_per_s, nbytes * self.software.link_byte_s + self.software.message_s)
        return self._hop(nbytes) + (peers - 1) * each

    def _broadcast(self, nbytes: int, ranks: int) -> float:
        """Duration of a broadcast: all ranks meet, then each receives a small payload from the root, and a large one
        chunk by chunk from its neighbor."""
        meeting = self._exchange(0, ranks - 1)
        if nbytes <= DIRECT_BYTES:
            return meeting + self._exchange(nbytes, ranks - 1)
        # A pipeline: all bytes pass the last link, after the first chunk has passed the ranks before it.
        return meeting + nbytes * self._byte_s(CHUNK_BYTES) + max(0, ranks - 2) * self._hop(CHUNK_BYTES)

    # Within a machine.

    def _through_memory(self, nbytes: float, workers: int) -> float:
        """All workers of a machine copy at the same time and share its memory bandwidth. Two were measured."""
        return nbytes * self.software.local_byte_s * workers / 2 if workers > 1 else 0.0
