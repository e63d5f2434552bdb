"""Which worker of an elastic job runs where. No process comes near it.

A job has as many *seats* as it may have workers; each keeps its name (`worker/2`) for the life of the job. Hosts come
and go, and each has *slots*. A seat that is vacant (its worker was lost with its host, or sent away) takes a free slot,
on whatever host that is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostSlot:
    """One worker's place on a host, `number` counted from 0."""

    host: str
    number: int


class SlotAssignment:
    """See the top of this file.

    Args:
        seats: ranks of those tasks of the job that train.
        wanted: how many of them are to be taken.
    """

    def __init__(self, seats: Sequence[int], wanted: int):
        self.wanted = wanted
        self._seats = list(seats)
        self._taken: dict[int, HostSlot] = {}
        self._going: set[int] = set()
        self._offered: dict[str, int] = {}

    @property
    def offered(self) -> Mapping[str, int]:
        """The hosts that workers may run on, and their numbers of slots."""
        return self._offered

    def offer(self, hosts: Mapping[str, int]) -> None:
        """These are the hosts now. Those known already stay first, in their order: older hosts get lower ranks."""
        known = [host for host in self._offered if host in hosts]
        self._offered = {host: hosts[host] for host in [*known, *hosts]}

    @property
    def seats(self) -> int:
        """How many workers the job can have at most, from now on."""
        return len(self._seats)

    def slot(self, rank: int) -> HostSlot | None:
        """Where a worker sits."""
        return self._taken.get(rank)

    def ranks_on(self, host: str) -> list[int]:
        """The workers that sit on a host."""
        return sorted(rank for rank, slot in self._taken.items() if slot.host == host)

    def stays(self, rank: int) -> bool:
        """Whether a worker's slot is still there, and the worker not on its way out."""
        slot = self._taken.get(rank)
        return slot is not None and rank not in self._going and self._is_offered(slot)

    def leave(self, rank: int) -> None:
        """A worker has ended: its seat is vacant."""
        self._taken.pop(rank, None)
        self._going.discard(rank)

    def retire(self, rank: int) -> None:
        """A worker was given up: its seat is not taken any more."""
        self.leave(rank)
        if rank in self._seats:
            self._seats.remove(rank)

    def send_away(self) -> list[int]:
        """The workers whose slots are not there any more; each is named once."""
        going = [r for r, slot in sorted(self._taken.items()) if r not in self._going and not self._is_offered(slot)]
        self._going |= set(going)
        return going

    def fill(self, slots: Callable[[str], int]) -> list[tuple[int, HostSlot]]:
        """Give vacant seats free slots, first seats first; hosts are filled in their order.

        Args:
            slots: how many slots of a host can be used now.
        """
        taken = set(self._taken.values())
        free = [
            slot
            for host, offered in self._offered.items()
            for number in range(min(offered, slots(host)))
            if (slot := HostSlot(host, number)) not in taken
        ]
        vacant = [rank for rank in self._seats if rank not in self._taken]
        room = max(0, self.wanted - len(self._taken.keys() - self._going))
        placed = list(zip(vacant[:room], free, strict=False))
        self._taken.update(placed)
        return placed

    def left_behind(self, connected: Collection[str]) -> list[str]:
        """The hosts that are not offered any more and that nobody sits on."""
        return [host for host in connected if host not in self._offered and not self.ranks_on(host)]

    def _is_offered(self, slot: HostSlot) -> bool:
        return slot.number < self._offered.get(slot.host, 0)
