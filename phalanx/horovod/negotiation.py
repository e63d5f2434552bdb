"""Decides which requested operations can start. Pure functions.

Ranks request operations by name, in different orders. An operation starts when every rank has requested it. So in each
round, the ranks exchange what they wait for. Since that would cost more than a small operation, all ranks cache the
agreed requests under the same number (`RequestCache`), and a repeated request costs one bit. Ranks send their requests
in full (`RankRequests`) only in rounds in which some rank has something new.

There is no coordinator: every rank derives the same decisions from the same requests, in the same order (`decide`,
`fuse`).

Source: the controller and response cache of Horovod, in which rank 0 decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from phalanx.horovod.operation_request import HorovodOp, OperationKind, Request, describe_mismatch


class RankRequests(msgspec.Struct, frozen=True, array_like=True):
    """The operations that one rank waits for.

    Attributes:
        requests: Requests, or the numbers of cached ones.
        has_joined: Whether the rank has run out of data.
        overdue: Names of operations for which it has waited too long, and the seconds. All ranks receive them, so that
            all end in the same round: a rank that used only its own clock could end earlier, and the others would only
            see a lost peer.
    """

    requests: list[Request | int]
    has_joined: bool = False
    overdue: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class NegotiationResult:
    """An operation that all ranks have requested: it starts or, with an `error`, fails."""

    request: Request
    error: str = ""


class RequestCache:
    """Agreed requests, under numbers that are equal on all ranks.

    All ranks add the same requests in the same order, so all evict the same ones, least recently used first.

    Args:
        capacity: Maximum number of requests; 0 for no cache.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._numbers: OrderedDict[str, int] = OrderedDict()  # by name, least recently used first
        self._requests: list[Request] = []  # by number; the next request takes over an evicted number

    def number_of(self, request: Request) -> int | None:
        """Return the number of a request; None if it is not cached, or differs from the cached one with its name."""
        number = self._numbers.get(request.name)
        if number is None:
            return None
        known = self._requests[number]
        return number if known is request or known == request else None

    def __getitem__(self, number: int) -> Request:
        return self._requests[number]

    def add(self, request: Request) -> None:
        """Add a request on which all ranks have just agreed."""
        if not self.capacity:
            return
        number = self._numbers.get(request.name)
        if number is None:
            if len(self._requests) < self.capacity:
                number = len(self._requests)
                self._requests.append(request)
            else:
                _, number = self._numbers.popitem(last=False)
            self._numbers[request.name] = number
        self._numbers.move_to_end(request.name)
        # Even if the name is known: its request may now have another shape.
        self._requests[number] = request

    def resolve(self, rank_requests: RankRequests) -> list[Request]:
        """Return the requests of a rank, including cached ones."""
        return [self[item] if isinstance(item, int) else item for item in rank_requests.requests]


def decide(requests_by_rank: Sequence[Sequence[Request]], joined: Collection[int]) -> list[NegotiationResult]:
    """Return the operations that every rank has requested, in the same order on all ranks.

    Args:
        requests_by_rank: The requests of each rank.
        joined: Ranks that have run out of data; the others do not wait for them.
    """
    # Insertion order: the requests of rank 0, in its order, then those only of later ranks. Equal on all ranks.
    by_name: dict[str, list[tuple[int, Request]]] = {}
    for rank, requests in enumerate(requests_by_rank):
        for request in requests:
            by_name.setdefault(request.name, []).append((rank, request))
    results = []
    for name, requests_of in by_name.items():
        # A union: another thread of a rank that has joined may also request.
        if len({rank for rank, _ in requests_of}.union(joined)) == len(requests_by_rank):
            request = requests_of[0][1]
            error = describe_mismatch(name, requests_of) or refusal_reason(request, joined)
            results.append(NegotiationResult(request, error))
    return results


def refusal_reason(request: Request, joined: Collection[int]) -> str:
    """Return why an operation cannot run without the ranks that have joined; empty if it can."""
    if not joined or request.kind == OperationKind.BARRIER:
        return ""
    if request.kind == OperationKind.ALLREDUCE and request.op != HorovodOp.ADASUM:
        return ""
    what = f"{request.kind} {request.op}".strip()
    return (
        f"{request.name!r}: {what} cannot be done after rank {', '.join(map(str, sorted(joined)))} has joined: "
        f"its input is unknown. Only allreduce (not Adasum) and barrier can."
    )


def absent_ranks(requests_by_rank: Sequence[Sequence[Request]], joined: Collection[int]) -> dict[str, list[int]]:
    """Return, for each operation that only some ranks have requested, the ranks that have not."""
    names = dict.fromkeys(request.name for requests in requests_by_rank for request in requests)
    requested = [{request.name for request in requests} for requests in requests_by_rank]
    ranks = {
        name: [rank for rank, own in enumerate(requested) if name not in own and rank not in joined] for name in names
    }
    return {name: missing for name, missing in ranks.items() if missing}


def fuse(requests: Sequence[Request], threshold: int) -> list[list[Request]]:
    """Divide requests into batches that each travel together.

    Compatible neighbors share a batch of up to `threshold` bytes; a larger request has a separate batch.
    """
    batches: list[list[Request]] = []
    room, batch_key = 0, None
    for request in requests:
        size, key = request.nbytes, _fusion_key(request)
        if not batches or key is None or key != batch_key or size > room:
            batches.append([])
            room, batch_key = threshold, key
        batches[-1].append(request)
        room -= size
    return batches


def _fusion_key(request: Request) -> tuple[object, ...] | None:
    """Return a key that is equal for requests that may share a batch; None for a request that may not."""
    if request.kind == OperationKind.ALLREDUCE:
        return request.kind, request.op, request.prescale, request.postscale
    if request.kind == OperationKind.BROADCAST:
        return request.kind, request.root
    return None
