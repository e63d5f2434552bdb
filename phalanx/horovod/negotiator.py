"""The rounds in which ranks agree on the operations that can start. `negotiation` decides, this module exchanges."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from phalanx.collectives.communicator import ReduceOp
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.errors import CollectiveTimeoutError
from phalanx.horovod.horovod_environment import HorovodEnvironment
from phalanx.horovod.negotiation import (
    NegotiationResult,
    RankRequests,
    RequestCache,
    absent_ranks,
    decide,
    refusal_reason,
)
from phalanx.horovod.operation_request import Request
from phalanx.horovod.stall_inspector import StallInspector
from phalanx.monitoring import timeline
from phalanx.transport.decoding import Decoder

if TYPE_CHECKING:
    from phalanx.horovod.controller import OperationHandle

_log = logging.getLogger(__name__)

_NOTHING_NEW = 0
_FIRST_REQUEST = 1
"""Positions of a round's bits: the first means "nothing new", the others stand for awaited cached requests."""
_NAMES_IN_MESSAGES = 5


class RoundResult(NamedTuple):
    """The result of a round.

    Attributes:
        operations: Operations that can start or have failed, in the same order on all ranks.
        last_joined: After all ranks have joined, the last rank that did.
    """

    operations: Sequence[NegotiationResult]
    last_joined: int | None = None


class Negotiator:
    """One rank's part in the rounds. Not thread-safe: only the thread that runs the controller's rounds uses it.

    Args:
        communicator: The communicator of the ranks.
        environment: Horovod's variables: the capacity of the cache, and when to warn.
        timeout_s: Seconds after which an operation that other ranks do not request ends the job.
        names: Names of the ranks for messages.

    Attributes:
        stalls: Detector of stalled operations.
    """

    def __init__(
        self, communicator: HostCommunicator, environment: HorovodEnvironment, timeout_s: float, names: Sequence[str]
    ):
        self._communicator = communicator
        self.stalls = StallInspector(environment.stall_warning_s, timeout_s, names)
        self._cache = RequestCache(environment.cache_capacity)
        # One byte per bit, 0 or 1, whose minimum over the ranks is their `and`. The length is equal on all ranks: if
        # the capacity differs, the first round is a mismatch.
        self._bits = np.zeros(_FIRST_REQUEST + environment.cache_capacity, np.uint8)
        self._merged = np.empty_like(self._bits)
        self._joined: list[int] = []  # in the order of joining
        self._waiting: Mapping[str, OperationHandle] = {}  # of the current round, for messages
        stalls = communicator.runner.stalls
        stalls.stall_s, stalls.on_stall = environment.stall_warning_s, lambda call, ranks: self._warn_absent(ranks)

    def negotiate(self, waiting: Mapping[str, OperationHandle], *, is_joining: bool) -> RoundResult:
        """Take part in one round; return when all ranks have.

        Args:
            waiting: The operations that this rank waits for, by name.
            is_joining: Whether this rank has run out of data.

        Raises: CollectiveTimeoutError if a rank does not take part, or an operation is overdue.
        """
        if timeline.current.marks_cycles:
            timeline.current.instant(timeline.COLLECTIVES, "CYCLE_START")
        self._waiting = waiting
        requests = self._write_bits(waiting, is_joining=is_joining)
        try:
            self._communicator.all_reduce([self._bits], ReduceOp.MIN, out=[self._merged])
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(f"{self._waiting_names()} did not begin: {error}") from error
        # The merged bits are equal on all ranks, so all take the same branch.
        if not self._merged[_NOTHING_NEW]:
            return self._exchange_requests(
                waiting, RankRequests(requests, is_joining, self.stalls.overdue(waiting.values()))
            )
        ready = [self._cache[int(number)] for number in np.flatnonzero(self._merged[_FIRST_REQUEST:])]
        return RoundResult(
            self._cache_agreed([NegotiationResult(request, refusal_reason(request, self._joined)) for request in ready])
        )

    def _write_bits(self, waiting: Mapping[str, OperationHandle], *, is_joining: bool) -> list[Request | int]:
        """Set this rank's bits (all if it has joined), and return its requests, by number if cached."""
        # `_joined` holds what all ranks know; until it contains this rank, its join is new.
        has_joined = self._communicator.rank in self._joined
        self._bits[:] = has_joined
        self._bits[_NOTHING_NEW] = is_joining == has_joined and not self.stalls.needs_full_exchange(waiting.values())
        requests: list[Request | int] = []
        for pending in waiting.values():
            number = self._cache.number_of(pending.request)
            if number is None:
                self._bits[_NOTHING_NEW] = 0
                requests.append(pending.request)
            else:
                self._bits[_FIRST_REQUEST + number] = 1
                requests.append(number)
        return requests

    def _exchange_requests(self, waiting: Mapping[str, OperationHandle], own: RankRequests) -> RoundResult:
        encoded = self._communicator.all_gather_bytes(_encode(own))
        ranks = [_DECODER.decode(item) for item in encoded]
        # Ranks of one round are in rank order, so that the last one is the same on all ranks.
        self._joined += [rank for rank, each in enumerate(ranks) if each.has_joined and rank not in self._joined]
        # Includes the ranks of this round, even if all have joined: requests made before joining wait for no rank.
        joined, last = self._joined, None
        if len(joined) == self._communicator.world_size:
            last, self._joined = joined[-1], []
        # Before this round caches anything: the numbers refer to the cache at the time they were sent.
        requested = [self._cache.resolve(each) for each in ranks]
        missing = absent_ranks(requested, joined)
        for stall in self.stalls.inspect(waiting, missing):
            self._warn_stalled(stall.name, {*stall.ranks, *joined}, stall.ranks, "which request other operations")
        self.stalls.raise_if_overdue([each.overdue for each in ranks], missing)
        return RoundResult(self._cache_agreed(decide(requested, joined)), last)

    def _cache_agreed(self, results: list[NegotiationResult]) -> list[NegotiationResult]:
        """Cache the requests that can start, on all ranks, and return the results."""
        for result in results:
            if not result.error:
                self._cache.add(result.request)
        return results

    def _warn_absent(self, ranks: Sequence[int]) -> None:
        """Warn that a round has waited too long for ranks that request nothing."""
        self._warn_stalled(self._waiting_names(), set(ranks), ranks, "which have not requested it")

    def _waiting_names(self) -> str:
        """Return the names of the requests that this rank waits for."""
        names = list(self._waiting) or ["join"]
        return ", ".join(names[:_NAMES_IN_MESSAGES]) + (", ..." if len(names) > _NAMES_IN_MESSAGES else "")

    def _warn_stalled(self, names: str, idle_ranks: Set[int], ranks: Sequence[int], reason: str) -> None:
        """Warn about absent `ranks`, on the first rank that waits: not on `idle_ranks`, which do not wait."""
        if self._communicator.rank != min(set(range(self._communicator.world_size)) - idle_ranks, default=0):
            return  # one rank is enough
        _log.warning(
            "stalled for more than %g s: %s waits for %s, %s. The job ends after %g s "
            "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).",
            self.stalls.warn_after_s,
            names,
            self.stalls.describe_ranks(ranks),
            reason,
            self.stalls.abort_after_s,
        )


_encode = msgspec.msgpack.Encoder().encode
_DECODER = Decoder(RankRequests)
