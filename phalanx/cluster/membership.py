"""One generation of a job: its members, their ranks, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.errors import PeerLostError
from phalanx.transport.link import Link, wait_until_delivered

Rank = int

FIRST_GENERATION = 1
SEE_TASK_OUTPUT = "See the end of that task's output for the cause."
CONNECTION_CLOSED = f"its connection closed, so the process or its host died. {SEE_TASK_OUTPUT}"
"""The default explanation for a lost task."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the job.

    Attributes:
        rank: Number of the member, 0 to world_size - 1; rank 0 is the chief.
        task: Name in the cluster, for example `worker/1`.
        host: Identity of its host: equal for two members that can share memory.
        address: `host:port` of its listening port.
        pid: Process id on its host.
        incarnation: Random identifier, different in each process.
    """

    rank: Rank
    task: str
    host: str
    address: str
    pid: int
    incarnation: str = ""


@dataclass(slots=True)
class GenerationState:
    """State of a generation that collectives and the elastic node share. Unused in jobs of fixed size.

    It needs no lock: `abort_at` is a single store, which a reader may see one poll late; `unresponsive` belongs to the
    thread that runs collectives and, between two generations, to the thread that reports.

    Attributes:
        abort_at: The time (`time.monotonic`) at which waiting collectives give up because the generation has ended. Set
            by the node's thread.
        unresponsive: Ranks that did not arrive in time or whose connection broke. Set by collectives.
    """

    abort_at: float = math.inf
    unresponsive: set[Rank] = field(default_factory=set)


@dataclass(frozen=True)
class Membership:
    """The members of one generation, seen from one of them.

    Attributes:
        generation: Number that increases by one whenever a member leaves or joins.
        rank: The rank of this process.
        members: All members, in rank order.
        links: An open link to every other rank; `close()` closes them.
        state: See `GenerationState`.
    """

    generation: int
    rank: Rank
    members: tuple[Member, ...]
    links: Mapping[Rank, Link] = field(default_factory=dict)
    state: GenerationState = field(default_factory=GenerationState, compare=False)

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def local_member(self) -> Member:
        return self.members[self.rank]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The distinct hosts, in the order of their lowest rank."""
        return tuple(dict.fromkeys(member.host for member in self.members))

    def ranks_on(self, host: str) -> tuple[Rank, ...]:
        return tuple(member.rank for member in self.members if member.host == host)

    @property
    def local_ranks(self) -> tuple[Rank, ...]:
        """The ranks on this process's host, in rank order."""
        return self.ranks_on(self.local_member.host)

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    def peer_lost_error(self, rank: Rank, activity: str, reason: str = "") -> PeerLostError:
        """Return the error that names a lost member.

        Args:
            rank: Rank of the lost member.
            activity:The activity of this process.
            reason:State of the connection as a sentence; by default, that it closed.
        """
        member = self.members[rank]
        return PeerLostError(
            f"{self.local_member.task} (rank {self.rank}) lost {member.task} (rank {rank}, pid {member.pid} on "
            f"{member.host}, {member.address}) during {activity}: {reason or CONNECTION_CLOSED}",
            rank=rank,
            task=member.task,
            host=member.host,
        )

    def close(self, *, flush: bool = False) -> None:
        """Close the links.

        Args:
            flush: Whether to wait until all bytes sent over them have arrived.
        """
        if flush:
            wait_until_delivered(self.links.values())
        for link in self.links.values():
            link.close()
