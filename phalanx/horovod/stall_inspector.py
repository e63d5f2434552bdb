"""Finds operations that some ranks wait for and others have not requested, to warn or to end the job. No I/O.

Ranks that request other operations still take part in rounds, so the operations wait, but no collective does. (If a
rank does not take part in a round, the round's collective detects it.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from phalanx.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from phalanx.horovod.controller import OperationHandle


class Stall(NamedTuple):
    """An operation that has waited too long, and the ranks that have not requested it."""

    name: str
    ranks: Sequence[int]


class StallInspector:
    """Watches the operations that one rank waits for.

    Args:
        warn_after_s: Seconds after which the absent ranks are named, once for each request of an operation.
        abort_after_s: Seconds after which the job ends.
        names: Names of the ranks, for messages.
        clock: Function that returns the time in seconds; replaced by tests.
    """

    def __init__(
        self,
        warn_after_s: float,
        abort_after_s: float,
        names: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.warn_after_s = warn_after_s
        self.abort_after_s = abort_after_s
        self._names = names
        self._clock = clock
        # Unfinished operations whose absent ranks have been found. Without it, `needs_full_exchange` would be true in
        # every round after `warn_after_s`, and each would exchange all requests.
        self._warned: set[str] = set()

    def needs_full_exchange(self, waiting: Iterable[OperationHandle]) -> bool:
        """Return whether an operation has waited so long that all ranks should send their requests in full."""
        now = self._clock()
        warn, end = now - self.warn_after_s, now - self.abort_after_s
        return any(
            pending.requested_at < end or (pending.requested_at < warn and pending.request.name not in self._warned)
            for pending in waiting
        )

    def inspect(self, waiting: Mapping[str, OperationHandle], absent: Mapping[str, Sequence[int]]) -> list[Stall]:
        """Return the operations to warn about now.

        Args:
            waiting: Operations that this rank waits for, by name.
            absent: The ranks that have not requested an operation, for each operation that only some have requested.
        """
        now = self._clock()
        stalls = []
        for name, ranks in absent.items():
            pending = waiting.get(name)
            if pending is None or name in self._warned or now - pending.requested_at <= self.warn_after_s:
                continue
            self._warned.add(name)
            stalls.append(Stall(name, ranks))
        return stalls

    def overdue(self, waiting: Iterable[OperationHandle]) -> dict[str, float]:
        """Return the names of operations that have waited longer than `abort_after_s`, with the seconds.

        The result is sent to all ranks.
        """
        now = self._clock()
        waited = {pending.request.name: now - pending.requested_at for pending in waiting}
        return {name: seconds for name, seconds in waited.items() if seconds > self.abort_after_s}

    def raise_if_overdue(self, overdue: Sequence[Mapping[str, float]], absent: Mapping[str, Sequence[int]]) -> None:
        """End the job, on all ranks in the same round, if an operation has waited too long on any of them.

        Args:
            overdue: The result of `overdue` on each rank.
            absent: See `inspect`.

        Raises: CollectiveTimeoutError with the waiting and the absent ranks; the same on all ranks.
        """
        for rank, waited in enumerate(overdue):
            for name, waited_s in waited.items():
                if name in absent:  # otherwise the last rank arrived in this very round
                    raise CollectiveTimeoutError(
                        f"{name!r} has waited {waited_s:.0f} s on {self.describe_ranks([rank])} for "
                        f"{self.describe_ranks(absent[name])}, which took part in other operations meanwhile. Do all "
                        f"ranks request the same operations?"
                    )

    def forget(self, name: str) -> None:
        """Forget an operation that has ended, to warn again if the next one with this name stalls."""
        self._warned.discard(name)

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """Return the names of ranks, for messages."""
        return " and ".join(f"rank {rank} ({self._names[rank]})" for rank in ranks)
