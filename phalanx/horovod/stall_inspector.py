"""Operations that some ranks wait for and others have not asked for: who is named, and when that is the end. No I/O.

Ranks that ask for other things take part in rounds all the while, so that no collective waits: what waits too long are
the operations. (That a rank does not come to a round at all is noticed in the round's collective.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from phalanx.errors import CollectiveTimeoutError
from phalanx.horovod.operation_request import Request


class PendingRequest(Protocol):
    """An operation that this rank waits for."""

    @property
    def request(self) -> Request: ...

    @property
    def asked_at(self) -> float:
        """When, by the inspector's clock."""
        ...


class Stall(NamedTuple):
    """An operation that has waited too long, and the ranks that have not asked for it."""

    name: str
    ranks: Sequence[int]


class StallInspector:
    """Looks at what one rank waits for.

    Args:
        warn_s: seconds after which the absent are named, once for each time an operation is asked for.
        end_s: seconds after which the job ends.
        names: of the ranks, for messages.
        clock: in seconds, for tests.
    """

    def __init__(
        self, warn_s: float, end_s: float, names: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.warn_s = warn_s
        self.end_s = end_s
        self._names = names
        self._clock = clock
        self._warned: set[str] = set()

    def is_due(self, waiting: Iterable[PendingRequest]) -> bool:
        """Whether something has waited so long that all ranks should say in full what they wait for."""
        now = self._clock()
        warn, end = now - self.warn_s, now - self.end_s
        return any(
            asked.asked_at < end or (asked.asked_at < warn and asked.request.name not in self._warned)
            for asked in waiting
        )

    def inspect(self, waiting: Mapping[str, PendingRequest], absent: Mapping[str, Sequence[int]]) -> list[Stall]:
        """What is to be warned of now.

        Args:
            waiting: of this rank, by name.
            absent: for each name that only some ranks wait for, the ranks that do not.
        """
        now = self._clock()
        stalls = []
        for name, ranks in absent.items():
            asked = waiting.get(name)
            if asked is None or name in self._warned or now - asked.asked_at <= self.warn_s:
                continue
            self._warned.add(name)
            stalls.append(Stall(name, ranks))
        return stalls

    def overdue(self, waiting: Iterable[PendingRequest]) -> dict[str, float]:
        """What has waited for longer than `end_s`, by name, and how long, in seconds: for all ranks to hear."""
        now = self._clock()
        waited = {asked.request.name: now - asked.asked_at for asked in waiting}
        return {name: seconds for name, seconds in waited.items() if seconds > self.end_s}

    def end_overdue(self, overdue: Sequence[Mapping[str, float]], absent: Mapping[str, Sequence[int]]) -> None:
        """End the job, on all ranks in the same round, if something has waited too long on any of them.

        Args:
            overdue: of each rank.
            absent: see `inspect`.

        Raises: CollectiveTimeoutError, naming who waited and who is absent; the same on all ranks.
        """
        for rank, waited in enumerate(overdue):
            for name, waited_s in waited.items():
                if name in absent:
                    raise CollectiveTimeoutError(
                        f"{name!r} has waited {waited_s:.0f} s on {self.who([rank])} for {self.who(absent[name])}, "
                        f"which took part in other operations meanwhile. Do all ranks ask for the same operations?"
                    )

    def is_over(self, name: str) -> None:
        """This operation has ended; the next time it may be warned of again."""
        self._warned.discard(name)

    def who(self, ranks: Sequence[int]) -> str:
        """These ranks, for messages."""
        return " and ".join(f"rank {rank} ({self._names[rank]})" for rank in ranks)
