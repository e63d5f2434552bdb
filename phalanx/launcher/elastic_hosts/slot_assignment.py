"""Assigns the workers of an elastic job to slots of hosts. Pure bookkeeping.

The workers of a job are numbered up to its maximum; each keeps its rank and its name (`worker/2`) for the life of the
job. Hosts join and leave, and each has *slots*. A worker without a slot (its process was lost with its host, or left)
gets a free slot on any host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostSlot:
    """One slot of a host; `number` counts from 0."""

    host: str
    number: int


class SlotAssignment:
    """See the module docstring.

    Args:
        ranks: Ranks of the tasks that train.
        target: Number of workers that should run.

    Attributes:
        target: Number of workers that should run; may be changed.
    """

    def __init__(self, ranks: Sequence[int], target: int):
        self.target = target
        self._ranks = list(ranks)  # those not retired
        self._assigned: dict[int, HostSlot] = {}  # slots no longer offered stay until their workers exit
        self._leaving: set[int] = set()  # workers that `withdraw` has returned and that have not exited
        self._offered: dict[str, int] = {}  # slots by host

    def set_hosts(self, hosts: Mapping[str, int]) -> None:
        """Replace the hosts and their numbers of slots. Known hosts stay first, in their order, so that older hosts get
        lower ranks."""
        known = [host for host in self._offered if host in hosts]
        self._offered = {host: hosts[host] for host in [*known, *hosts]}

    @property
    def max_workers(self) -> int:
        """Maximum number of workers that the job can still have."""
        return len(self._ranks)

    def slot(self, rank: int) -> HostSlot | None:
        """The slot of a worker; None if it has none."""
        return self._assigned.get(rank)

    def ranks_on(self, host: str) -> list[int]:
        """Ranks of the workers on a host."""
        return sorted(rank for rank, slot in self._assigned.items() if slot.host == host)

    def keeps_slot(self, rank: int) -> bool:
        """Whether a worker's slot is still offered and the worker is not about to leave it."""
        slot = self._assigned.get(rank)
        return slot is not None and rank not in self._leaving and self._is_offered(slot)

    def free(self, rank: int) -> None:
        """Free the slot of a worker that has exited."""
        self._assigned.pop(rank, None)
        self._leaving.discard(rank)

    def retire(self, rank: int) -> None:
        """Free the slot of a worker that has exited for good and gets no other slot."""
        self.free(rank)
        if rank in self._ranks:
            self._ranks.remove(rank)

    def withdraw(self) -> list[int]:
        """Return the workers whose slots are no longer offered, each only once."""
        leaving = [
            r for r, slot in sorted(self._assigned.items()) if r not in self._leaving and not self._is_offered(slot)
        ]
        self._leaving |= set(leaving)
        return leaving

    def assign(self, usable: Callable[[str], int]) -> list[tuple[int, HostSlot]]:
        """Assign free slots to workers without one, in rank order; hosts are filled in their order.

        Args:
            usable: Returns the number of slots of a host that can be used now.
        """
        taken = set(self._assigned.values())
        free = [
            slot
            for host, offered in self._offered.items()
            for number in range(min(offered, usable(host)))
            if (slot := HostSlot(host, number)) not in taken
        ]
        waiting = [rank for rank in self._ranks if rank not in self._assigned]
        # A leaving worker is replaced elsewhere immediately: the job does not wait for its exit.
        missing = max(0, self.target - len(self._assigned.keys() - self._leaving))
        assigned = list(zip(waiting[:missing], free, strict=False))
        self._assigned.update(assigned)
        return assigned

    def unused_hosts(self, connected: Collection[str]) -> list[str]:
        """Connected hosts that are no longer offered and have no workers."""
        return [host for host in connected if host not in self._offered and not self.ranks_on(host)]

    def _is_offered(self, slot: HostSlot) -> bool:
        return slot.number < self._offered.get(slot.host, 0)
