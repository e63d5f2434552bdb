"""Which of the operations that the ranks have asked for can begin now. All pure.

Ranks ask in different orders, by name. An operation begins when every rank has asked for it. So the ranks tell each
other, round after round, what they have asked for and wait for. That would cost more than a small operation itself,
so what has been agreed on once is remembered by all ranks under the same number (`RequestCache`), and a rank then says one
bit. Only in rounds in which some rank has something new do all of them say in full what they wait for (`RankRequests`).

From what it hears every rank draws the same conclusions, in the same order (`decide`, `fuse`): there is no coordinator.

Source: Horovod's controller and response cache, whose idea this is; there rank 0 decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from phalanx.horovod.operation_request import HorovodOp, OperationKind, Request, difference


class RankRequests(msgspec.Struct, frozen=True, array_like=True):
    """What one rank waits for.

    Attributes:
        waits_for: requests, or the numbers of those that are known.
        joined: whether it has run out of data.
        overdue: the names of those for which it has waited too long, with the seconds. Told to all, since ranks that
            looked at their own clocks would not end in the same round, and the later one would see a lost peer only.
    """

    waits_for: list[Request | int]
    joined: bool = False
    overdue: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class NegotiationResult:
    """What becomes of an operation that all ranks have asked for: it begins, or, with an `error`, it fails."""

    request: Request
    error: str = ""


class RequestCache:
    """Requests that were agreed on, under numbers that are the same on all ranks.

    All ranks note the same requests in the same order, so all forget the same ones when there are too many.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._numbers: OrderedDict[str, int] = OrderedDict()  # the one that was used longest ago first
        self._requests: list[Request] = []

    def number_of(self, request: Request) -> int | None:
        """The number of this very request."""
        number = self._numbers.get(request.name)
        if number is None:
            return None
        known = self._requests[number]
        return number if known is request or known == request else None

    def __getitem__(self, number: int) -> Request:
        return self._requests[number]

    def note(self, request: Request) -> None:
        """All ranks have agreed on it just now."""
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
        self._requests[number] = request

    def resolve(self, statement: RankRequests) -> list[Request]:
        """A statement's requests."""
        return [self[item] if isinstance(item, int) else item for item in statement.waits_for]


def decide(waits_for: Sequence[Sequence[Request]], joined: Collection[int]) -> list[NegotiationResult]:
    """The operations that every rank has asked for, in an order that is the same on all ranks.

    Args:
        waits_for: the requests of each rank.
        joined: ranks that have run out of data; nobody waits for them, and in reductions they count as zeros.
    """
    by_name: dict[str, list[tuple[int, Request]]] = {}
    for rank, requests in enumerate(waits_for):
        for request in requests:
            by_name.setdefault(request.name, []).append((rank, request))
    verdicts = []
    for name, brought in by_name.items():
        if len({rank for rank, _ in brought}.union(joined)) == len(waits_for):
            request = brought[0][1]
            verdicts.append(NegotiationResult(request, difference(name, brought) or refusal(request, joined)))
    return verdicts


def refusal(request: Request, joined: Collection[int]) -> str:
    """Why an operation cannot be done without the ranks that have joined; empty if it can."""
    if not joined or request.kind == OperationKind.BARRIER:
        return ""
    if request.kind == OperationKind.ALLREDUCE and request.op != HorovodOp.ADASUM:
        return ""
    what = f"{request.kind} {request.op}".strip()
    return (
        f"{request.name!r}: {what} cannot be done after rank {', '.join(map(str, sorted(joined)))} has joined: "
        f"its part cannot be made up. Only allreduce (not Adasum) and barrier can."
    )


def absent(waits_for: Sequence[Sequence[Request]], joined: Collection[int]) -> dict[str, list[int]]:
    """For each name that only some ranks wait for, the ranks that have not asked for it."""
    names = dict.fromkeys(request.name for requests in waits_for for request in requests)
    asked = [{request.name for request in requests} for requests in waits_for]
    ranks = {name: [rank for rank, own in enumerate(asked) if name not in own and rank not in joined] for name in names}
    return {name: missing for name, missing in ranks.items() if missing}


def fuse(requests: Sequence[Request], threshold: int) -> list[list[Request]]:
    """Requests in batches, each of which can travel as one.

    Neighbours that are treated alike go together while they are not more than `threshold` bytes; a request that is
    larger goes alone.
    """
    batches: list[list[Request]] = []
    room, treatment = 0, None
    for request in requests:
        size, alike = request.nbytes, _treatment(request)
        if not batches or alike is None or alike != treatment or size > room:
            batches.append([])
            room, treatment = threshold, alike
        batches[-1].append(request)
        room -= size
    return batches


def _treatment(request: Request) -> tuple[object, ...] | None:
    """Equal for requests that may travel together; None for those that may not."""
    if request.kind == OperationKind.ALLREDUCE:
        return request.kind, request.op, request.prescale, request.postscale
    if request.kind == OperationKind.BROADCAST:
        return request.kind, request.root
    return None
