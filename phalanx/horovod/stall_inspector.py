"""Finds operations that some ranks wait for and others have not requested, to warn or to end the job. No I/O.

Ranks that request other operations keep taking part in rounds, so no collective waits; the operations do. (If a rank
takes part in no round at all, the round's collective notices.)
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
    """Watches what one rank waits for.

    Args:
        warn_s: seconds after which the absent ranks are named, once for each request of an operation.
        end_s: seconds after which the job ends.
        names: names of the ranks, for messages.
        clock: returns seconds; replaced by tests.
    """

    def __init__(
        self, warn_s: float, end_s: float, names: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.warn_s = warn_s
        self.end_s = end_s
        self._names = names
        self._clock = clock
        # Names whose absent ranks have been found, until they are done. Without it, `is_due` would hold in every round
        # from `warn_s` on, and each would be an exchange of all requests.
        self._warned: set[str] = set()

    def is_due(self, waiting: Iterable[OperationHandle]) -> bool:
        """Whether an operation has waited so long that all ranks should send their requests in full."""
        now = self._clock()
        warn, end = now - self.warn_s, now - self.end_s
        return any(
            pending.requested_at < end or (pending.requested_at < warn and pending.request.name not in self._warned)
            for pending in waiting
        )

    def inspect(self, waiting: Mapping[str, OperationHandle], absent: Mapping[str, Sequence[int]]) -> list[Stall]:
        """The operations to warn of now.

        Args:
            waiting: operations that this rank waits for, by name.
            absent: for each operation that only some ranks have requested, the ranks that have not.
        """
        now = self._clock()
        stalls = []
        for name, ranks in absent.items():
            pending = waiting.get(name)
            if pending is None or name in self._warned or now - pending.requested_at <= self.warn_s:
                continue
            self._warned.add(name)
            stalls.append(Stall(name, ranks))
        return stalls

    def overdue(self, waiting: Iterable[OperationHandle]) -> dict[str, float]:
        """Names of operations that have waited for longer than `end_s`, and for how many seconds; sent to all ranks."""
        now = self._clock()
        waited = {pending.request.name: now - pending.requested_at for pending in waiting}
        return {name: seconds for name, seconds in waited.items() if seconds > self.end_s}

    def end_overdue(self, overdue: Sequence[Mapping[str, float]], absent: Mapping[str, Sequence[int]]) -> None:
        """End the job, on all ranks in the same round, if an operation has waited too long on any of them.

        Args:
            overdue: what `overdue` returned on each rank.
            absent: see `inspect`.

        Raises: CollectiveTimeoutError with the waiting and the absent ranks; the same on all ranks.
        """
        for rank, waited in enumerate(overdue):
            for name, waited_s in waited.items():
                if name in absent:  # else the last rank has come in this very round
                    raise CollectiveTimeoutError(
                        f"{name!r} has waited {waited_s:.0f} s on {self.describe_ranks([rank])} for "
                        f"{self.describe_ranks(absent[name])}, which took part in other operations meanwhile. Do all "
                        f"ranks request the same operations?"
                    )

    def forget(self, name: str) -> None:
        """An operation of this name has ended: warn again if the next one stalls."""
        self._warned.discard(name)

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """Names of ranks, for messages."""
        return " and ".join(f"rank {rank} ({self._names[rank]})" for rank in ranks)
