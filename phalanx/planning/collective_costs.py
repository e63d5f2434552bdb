"""How long a collective of the host communicators takes among machines that are not there. All pure.

The formulas follow the algorithms in `collectives/host` packet by packet. A link carries `bytes_per_s`, both ways at
once, and a packet is `latency_s` under way. What this software costs (`SoftwareCosts`) is measured on one machine
(`collective_trial`). Each machine sends to one neighbour and receives from the other: nothing here knows of a switch
that is too narrow for all of them.

A *hop* is what a packet takes until the next rank can pass it on: its bytes, the latency, and the time in which that
rank wakes up and merges it.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.collectives.host.recording_algorithm import RecordedCall
from phalanx.collectives.host.ring_algorithm import CHUNK_BYTES, DIRECT_BYTES, PACK_BYTES

WIRE_EFFICIENCY = 1448 / 1538
"""Payload of TCP in Ethernet frames of 1500 bytes, with time stamps, preambles and gaps (RFC 7323, IEEE 802.3)."""


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
        """A link of this nominal rate."""
        return cls(bits_per_s / 8 * WIRE_EFFICIENCY, latency_s)


@dataclass(frozen=True, slots=True)
class SoftwareCosts:
    """Seconds of one core, as `collective_trial` measures them.

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
    """Where a job runs: `count` machines with `workers` replicas on each."""

    count: int
    workers: int = 1

    @property
    def replicas(self) -> int:
        return self.count * self.workers


@dataclass(frozen=True, slots=True)
class CollectiveCosts:
    """Predicts collectives for one kind of machine and network."""

    link: NetworkLink
    software: SoftwareCosts

    def seconds(self, call: RecordedCall, machines: Machines) -> float:
        """The duration of a collective that every rank calls at once."""
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
            return within / 2  # nothing comes from other machines, to be broadcast
        if call.nbytes <= DIRECT_BYTES:
            return within + self._exchange(call.nbytes, machines.count - 1)
        return within + sum(self._merge_dtype(arrays, nbytes, machines.count) for arrays, nbytes in call.packs)

    def _merge_dtype(self, arrays: int, nbytes: int, ranks: int) -> float:
        """`RingAlgorithm._reduce_array` or `_reduce_pack`: packs go around one after the other."""
        if arrays == 1:
            return self._ring(nbytes, ranks)
        whole, rest = divmod(nbytes, PACK_BYTES)
        rings = whole * self._ring(PACK_BYTES, ranks) + (self._ring(rest, ranks) if rest else 0.0)
        return nbytes * self.software.pack_byte_s + rings

    def _ring(self, nbytes: int, ranks: int) -> float:
        """2 (n - 1) steps. In each a share travels on, chunk by chunk: as fast as the link, or as this software, and
        not faster than its first chunk arrives and is merged."""
        share = nbytes / ranks
        chunk = min(share, CHUNK_BYTES)
        step = max(share * self._byte_s(chunk), self._hop(chunk))
        return 2 * (ranks - 1) * step

    def _byte_s(self, chunk: float) -> float:
        """Of a byte in a stream of packets: the link and the processor work at the same time."""
        return max(1 / self.link.bytes_per_s, self.software.link_byte_s + self.software.message_s / chunk)

    def _hop(self, nbytes: float) -> float:
        link, software = self.link, self.software
        return nbytes / link.bytes_per_s + link.latency_s + software.hop_s + nbytes * software.link_byte_s

    def _exchange(self, nbytes: float, peers: int) -> float:
        """A packet to each of the others, and one from each."""
        if peers == 0:
            return 0.0
        # The first packet takes a hop; those of the other peers queue behind it, at the link or at the core.
        each = max(nbytes / self.link.bytes_per_s, nbytes * self.software.link_byte_s + self.software.message_s)
        return self._hop(nbytes) + (peers - 1) * each

    def _broadcast(self, nbytes: int, ranks: int) -> float:
        """All meet; then each gets a small payload from the root, and a large one chunk by chunk from its neighbour."""
        meeting = self._exchange(0, ranks - 1)
        if nbytes <= DIRECT_BYTES:
            return meeting + self._exchange(nbytes, ranks - 1)
        # A pipeline: all bytes pass the last link, behind the first chunk's way through the ranks before it.
        return meeting + nbytes * self._byte_s(CHUNK_BYTES) + max(0, ranks - 2) * self._hop(CHUNK_BYTES)

    # Within a machine.

    def _through_memory(self, nbytes: float, workers: int) -> float:
        """All workers of a machine copy at once, and share its memory's bandwidth: two were measured."""
        return nbytes * self.software.local_byte_s * workers / 2 if workers > 1 else 0.0
