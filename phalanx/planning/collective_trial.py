"""Measures what collectives cost on this machine beyond the network: two processes, one core each, over loopback."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

from phalanx.cluster.membership import Member, Membership
from phalanx.collectives import CommunicationImplementation, CommunicationOptions, connect
from phalanx.collectives.communicator import Array, Communicator
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.collectives.host.ring_algorithm import CHUNK_BYTES, DIRECT_BYTES, PACK_BYTES, RingAlgorithm
from phalanx.errors import PhalanxError
from phalanx.planning.collective_costs import SoftwareCosts
from phalanx.runtime.core_affinity import bind, host_shares
from phalanx.transport.encryption import KEY_BYTES, SessionKeys
from phalanx.transport.link import Link

LARGE_BYTES = PACK_BYTES // 2
SMALL_CHUNK_BYTES = 16 * 1024
CALLS, WARM_UP_CALLS = 5, 1
"""The fastest call counts, because other load on this machine can only slow calls down."""
BOUND_S = 300.0


def measure_costs(*, encrypted: bool) -> SoftwareCosts:
    """Measure the costs of collectives on this machine. This takes about two seconds.

    Args:
        encrypted: Whether to encrypt, as between hosts in a job with a secret.

    Raises: PhalanxError if the two processes do not finish.
    """
    keys = [secrets.token_bytes(KEY_BYTES) for _ in range(2)] if encrypted else []
    # Forked children inherit the sockets and the imported modules.
    context = multiprocessing.get_context("fork")
    pairs = [_tcp_pair() for _ in range(2)]
    reader, writer = context.Pipe(duplex=False)
    others = [
        context.Process(target=_run_rank, args=(rank, pairs, keys, writer), name=f"phalanx-plan-{rank}", daemon=True)
        for rank in range(2)
    ]
    for process in others:
        process.start()
    writer.close()  # so that `recv` raises if both children exit without a result
    for end in itertools.chain.from_iterable(pairs):
        end.close()
    try:
        if not reader.poll(BOUND_S):
            raise PhalanxError(f"Two processes that merge values on this machine did not finish within {BOUND_S:g} s.")
        return _costs(reader.recv())
    except EOFError as error:
        raise PhalanxError("A process that merges values on this machine failed; see its error above.") from error
    finally:
        for process in others:
            process.join(5.0)
            process.kill()


def _costs(seconds: dict[str, float]) -> SoftwareCosts:
    """Derive the cost of each part from the durations of a few all-reduces."""
    # In a ring of two ranks, each rank sends and receives every byte once.
    link_byte_s = seconds["one array"] / LARGE_BYTES
    packets = LARGE_BYTES / SMALL_CHUNK_BYTES - LARGE_BYTES / CHUNK_BYTES  # extra packets for the same bytes
    message_s = max(0.0, seconds["small chunks"] - seconds["one array"]) / packets
    return SoftwareCosts(
        link_byte_s=link_byte_s,
        pack_byte_s=max(0.0, seconds["many arrays"] - seconds["one array"]) / LARGE_BYTES,
        message_s=message_s,
        # In a ring of two, 2 * DIRECT_BYTES take two hops of one chunk each.
        hop_s=max(message_s, seconds["one chunk"] / 2 - DIRECT_BYTES * link_byte_s),
        local_byte_s=seconds["shared memory"] / LARGE_BYTES,
    )


def _run_rank(rank: int, pairs: Sequence[Sequence[socket.socket]], keys: Sequence[bytes], writer: Connection) -> None:
    bind(host_shares(2)[rank].cores)
    first, second = (_membership(rank, ends, keys) for ends in pairs)
    found = {}
    with connect(first, CommunicationOptions(implementation=CommunicationImplementation.RING)) as ring:
        found["one array"] = _time(ring, [LARGE_BYTES])
        found["many arrays"] = _time(ring, [LARGE_BYTES // 32] * 32)
        found["one chunk"] = _time(ring, [2 * DIRECT_BYTES])
        _set_chunks(ring, SMALL_CHUNK_BYTES)
        found["small chunks"] = _time(ring, [LARGE_BYTES])
    with connect(second) as shared:
        found["shared memory"] = _time(shared, [LARGE_BYTES // 32] * 32)
    if rank == 0:
        writer.send(found)
    for membership in (first, second):
        membership.close(flush=True)


def _membership(rank: int, ends: Sequence[socket.socket], keys: Sequence[bytes]) -> Membership:
    """Membership of two members on this machine, as seen by one of them. Each communicator gets its own link."""
    ends[1 - rank].close()
    link = Link(ends[rank], f"worker/{1 - rank}")
    if keys:
        link.encrypt(SessionKeys(keys[rank], keys[1 - rank]))
    members = tuple(Member(i, f"worker/{i}", "here", "127.0.0.1:0", os.getpid()) for i in range(2))
    return Membership(1, rank, members, {1 - rank: link})


def _set_chunks(communicator: HostCommunicator, chunk_bytes: int) -> None:
    algorithm = communicator.runner.algorithm
    assert isinstance(algorithm, RingAlgorithm)
    algorithm.set_sizes(chunk_bytes, PACK_BYTES)


def _time(communicator: Communicator, sizes: Sequence[int]) -> float:
    """Measure the seconds of an all-reduce of arrays of these sizes in bytes."""
    arrays: list[Array] = [np.ones(size // 4, np.float32) for size in sizes]
    merged = [np.empty_like(array) for array in arrays]

    def call() -> None:
        communicator.all_reduce(arrays, out=merged)

    return _least_s(call, communicator.barrier)


def _least_s(call: Callable[[], None], meet: Callable[[], None]) -> float:
    seconds = []
    for _ in range(WARM_UP_CALLS + CALLS):
        meet()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds[WARM_UP_CALLS:])


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far
