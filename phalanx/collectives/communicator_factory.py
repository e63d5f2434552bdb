"""Connects the communicator of a membership: chooses its kind and sets up the shared memory that it needs."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence

import msgspec

from phalanx.cluster.membership import FIRST_GENERATION, Membership, Rank
from phalanx.collectives.autotune.autotune_log import AutotuneLog
from phalanx.collectives.autotune.autotuned_algorithm import AutotunedAlgorithm, TunableAlgorithm
from phalanx.collectives.host import shared_segment as segments
from phalanx.collectives.host.hierarchical_algorithm import HierarchicalAlgorithm
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.collectives.host.mesh import Mesh
from phalanx.collectives.host.ring_algorithm import RingAlgorithm
from phalanx.collectives.host.shared_memory_algorithm import (
    MIN_SLOT_BYTES,
    SLOT_BYTES,
    TUNED_SLOT_BYTES,
    SharedMemoryAlgorithm,
    segment_bytes,
)
from phalanx.collectives.host.shared_segment import SegmentOffer, SharedSegment
from phalanx.collectives.host.single_process import SingleProcessAlgorithm
from phalanx.collectives.options import CommunicationImplementation, CommunicationOptions
from phalanx.config.job_config import CollectiveConfig
from phalanx.errors import ConfigurationError, DisagreementError
from phalanx.monitoring import timeline
from phalanx.transport.decoding import decode_message
from phalanx.transport.throttle import Throttle

_log = logging.getLogger(__name__)

SHARED_MEMORY = "shared memory"
"""Kind of a communicator whose members are all on one host and share memory."""


class _Facts(msgspec.Struct, frozen=True):
    """Facts that the ranks exchange first."""

    implementation: str
    bytes_per_pack: int
    simulated_mbits: float
    autotune: bool
    cores: tuple[int, ...]


class _Setup(msgspec.Struct, frozen=True):
    """One attempt to share a segment: the first rank of a host makes the offer, and the others reply whether they could
    open it."""

    offer: SegmentOffer | None = None
    error: str = ""


_WITHOUT_STALL_WARNINGS = CollectiveConfig(stall_warning_s=math.inf)


def connect(
    membership: Membership,
    options: CommunicationOptions | None = None,
    *,
    segment_methods: Sequence[str] = segments.METHODS,
    config: CollectiveConfig = _WITHOUT_STALL_WARNINGS,
    timeline_track: str = timeline.COLLECTIVES,
) -> HostCommunicator:
    """Connect a communicator of all members. Every member must call this.

    With AUTO, values travel through shared memory within a host and through links between hosts. If processes of one
    host cannot share memory (other users, separate containers), they use links there as well.

    Args:
        membership: Members and their links.
        options: Options, equal on all ranks; None for the defaults.
        segment_methods: Methods to create shared memory, in order of preference (see `shared_segment.METHODS`). Empty
            to share no memory.
        config: The job's settings of collectives. Equal on all ranks, except for stalls and the log.
        timeline_track: Track of the timeline that shows the collectives.

    Raises:
        ConfigurationError: The options ask for NCCL.
        DisagreementError: The ranks' options differ.
        PeerLostError, CollectiveTimeoutError: As in any collective.

    Examples:
        with connect(membership) as communicator:
            (total,) = communicator.all_reduce([np.ones(3)])
    """
    options = options or CommunicationOptions()
    simulated_mbits, autotune = config.simulated_mbits, config.autotune
    if options.implementation is CommunicationImplementation.NCCL:
        raise ConfigurationError(
            "CommunicationImplementation.NCCL needs GPUs, and this version of Phalanx merges values on the "
            "host only. Use AUTO or RING."
        )
    mesh = Mesh(membership, None if simulated_mbits is None else Throttle(simulated_mbits * 1e6 / 8))
    mesh.track = timeline_track
    ranks = range(membership.world_size)
    if len(ranks) == 1:
        return HostCommunicator(mesh, SingleProcessAlgorithm(membership.rank), "single", options.timeout_s)
    # Using the links of the membership needs no agreement. The ranks agree on everything else over them.
    links = RingAlgorithm(mesh, ranks, options.bytes_per_pack)
    communicator = HostCommunicator(mesh, links, "ring", options.timeout_s)
    mesh.stalls.warn_after(config.stall_warning_s, options.timeout_s)
    facts = _agree(communicator, options, simulated_mbits, autotune)
    if not _core_for_each(membership.local_ranks, facts):
        mesh.spin_s = 0.0
    algorithms: dict[str, TunableAlgorithm] = {"ring": links}
    may_share = options.implementation is CommunicationImplementation.AUTO and simulated_mbits is None
    if may_share and len(membership.hosts) < len(ranks):
        algorithm = _algorithm(communicator, options, facts, segment_methods, links, autotune=autotune)
        kind = SHARED_MEMORY if len(membership.hosts) == 1 else "hierarchical"
        if algorithm is not links:
            communicator.kind, communicator.runner.algorithm = kind, algorithm
            algorithms = {kind: algorithm, **algorithms}
    if autotune:
        # Each generation of an elastic job tunes again; the file keeps the results of earlier generations.
        append = membership.generation > FIRST_GENERATION
        log = AutotuneLog(config.autotune_log, append=append) if membership.rank == 0 else None
        communicator.runner.algorithm = AutotunedAlgorithm(algorithms, log)
    _log.info(
        "rank %d of %d, generation %d: communicator through %s",
        membership.rank,
        membership.world_size,
        membership.generation,
        communicator.kind,
    )
    return communicator


def _agree(
    communicator: HostCommunicator, options: CommunicationOptions, simulated_mbits: float | None, autotune: bool
) -> list[_Facts]:
    """Exchange the facts of all ranks, and check what must be equal."""
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    own = _Facts(options.implementation.value, options.bytes_per_pack, simulated_mbits or 0.0, autotune, cores)
    encoded = communicator.all_gather_bytes(msgspec.msgpack.encode(own))
    facts = [decode_message(item, _Facts) for item in encoded]
    # All ranks compare the same facts, so all of them raise.
    for rank, other in enumerate(facts):
        for name in ("implementation", "bytes_per_pack", "simulated_mbits", "autotune"):
            mine, theirs = getattr(facts[0], name), getattr(other, name)
            if mine != theirs:
                members = communicator.membership.members
                raise DisagreementError(
                    f"the communication options differ: {members[0].task} (rank 0) has {name} = {mine!r}, "
                    f"{members[rank].task} (rank {rank}) has {theirs!r}. Give all tasks the same options."
                )
    return facts


def _algorithm(
    communicator: HostCommunicator,
    options: CommunicationOptions,
    facts: Sequence[_Facts],
    methods: Sequence[str],
    links: RingAlgorithm,
    *,
    autotune: bool,
) -> TunableAlgorithm:
    """Choose the algorithm for ranks of which some share a host; `links` if they cannot share memory."""
    membership, mesh = communicator.membership, links.mesh
    local_ranks = membership.local_ranks
    slot_bytes = max(MIN_SLOT_BYTES, min(SLOT_BYTES, options.bytes_per_pack or SLOT_BYTES))
    chunk_bytes = slot_bytes
    if autotune:
        slot_bytes = max(slot_bytes, TUNED_SLOT_BYTES)
    segment = _share(communicator, segment_bytes(len(local_ranks), slot_bytes), methods)
    if segment is None and len(local_ranks) > 1:
        _log.warning(
            "the ranks on %s cannot share memory and use their links instead, which is slower. "
            "The messages above say why.",
            membership.local_member.host,
        )
    local: SingleProcessAlgorithm | SharedMemoryAlgorithm | RingAlgorithm
    if len(local_ranks) == 1:
        local = SingleProcessAlgorithm(membership.rank)
    elif segment is not None:
        spin = _core_for_each(local_ranks, facts)
        local = SharedMemoryAlgorithm(mesh, local_ranks, segment, slot_bytes, chunk_bytes=chunk_bytes, spin=spin)
    else:
        local = RingAlgorithm(mesh, local_ranks, options.bytes_per_pack)
    if len(membership.hosts) == 1:
        return local if isinstance(local, SharedMemoryAlgorithm) else links
    leaders = [membership.ranks_on(host)[0] for host in membership.hosts]
    return HierarchicalAlgorithm(
        membership,
        local=local,
        leaders=RingAlgorithm(mesh, leaders, options.bytes_per_pack) if membership.rank in leaders else None,
        whole=links,
    )


def _core_for_each(local_ranks: Sequence[Rank], facts: Sequence[_Facts]) -> bool:
    """Whether the ranks of a host may use at least as many cores as there are ranks."""
    return len({core for rank in local_ranks for core in facts[rank].cores}) >= len(local_ranks)


def _share(communicator: HostCommunicator, size: int, methods: Sequence[str]) -> SharedSegment | None:
    """Return this host's segment, mapped by all its ranks; None if it has a single rank or cannot share memory.

    All ranks of all hosts take part in every attempt, so that they stay synchronized even if hosts differ.
    """
    membership = communicator.membership
    local_ranks = membership.local_ranks
    alone = len(local_ranks) == 1
    shared: SharedSegment | None = None
    for method in methods:
        segment, setup = None, _Setup()
        if not alone and shared is None and membership.rank == local_ranks[0]:
            try:
                segment = SharedSegment.create(size, method)
                setup = _Setup(segment.offer)
            except OSError as error:
                setup = _Setup(error=f"{method}: {error}")
        try:
            # Between the two exchanges, the others open the offer of the first rank, which keeps path and descriptor
            # until all have replied.
            offer = _gather(communicator, setup)[local_ranks[0]].offer
            error_text = setup.error
            if offer is not None and segment is None:
                try:
                    segment = SharedSegment.open(offer)
                except OSError as error:
                    error_text = f"{method}: {error}"
            opened = _gather(communicator, _Setup(offer if segment else None, error_text))
        except BaseException:  # a rank is lost: no other rank will open the segment
            if segment is not None:
                segment.close()
            raise
        if segment is not None:
            segment.settle()
            if all(opened[rank].offer for rank in local_ranks):
                shared = segment
            else:
                segment.close()
        errors = [f"rank {rank}: {opened[rank].error}" for rank in local_ranks if opened[rank].error]
        if errors:
            _log.info("no shared memory by %s", "; ".join(errors))
        if not any(item.error for item in opened):  # on any host: all ranks stop at the same method
            break
    return shared


def _gather(communicator: HostCommunicator, setup: _Setup) -> list[_Setup]:
    encoded = communicator.all_gather_bytes(msgspec.msgpack.encode(setup))
    return [decode_message(item, _Setup) for item in encoded]
