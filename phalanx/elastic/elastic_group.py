"""A process's participation in the generations of an elastic job, and collectives that survive the loss of a member.

*Every member raises `MembershipChangedError` at the same collective.* If a loss interrupts collective k, some members
may have finished it and be in k + 1, because a member may die after some have received its values. No member is
further, since k + 1 needs all of them. (A broadcast does not need its receivers, so here it ends with a barrier.)
Members that have finished k keep its result and hand it over to the others, whose call then returns normally. Then
k + 1 raises on all members. Programs that call the same collectives therefore stay in step, and a training step is
applied on all members or on none.

Others join only when all members are before the merge of the same training step (`join_points`). The coordinator
ensures this (`elastic_coordinator`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from phalanx.cluster import timeline_relay
from phalanx.cluster.membership_messages import EntryAlreadyFinished, EntryFinished, EntryLeft, EntryStarted
from phalanx.collectives.communicator_factory import connect
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.collectives.options import CommunicationOptions
from phalanx.elastic.elastic_node import ElasticNode
from phalanx.elastic.generation_loop import LOSSES, Position, form_next_generation, join_generation
from phalanx.elastic.join_points import JoinPoints
from phalanx.errors import LinkClosedError, LinkTimeoutError, MembershipChangedError, PhalanxError
from phalanx.monitoring import timeline
from phalanx.runtime.traffic_account import Traffic
from phalanx.transport.serialization import decode, encode

T = TypeVar("T")


def copy_result(result: Any) -> Any:
    """Return a copy of a collective's result."""
    if isinstance(result, list):
        return [copy_result(item) for item in result]
    return result.copy() if isinstance(result, np.ndarray) else result


class RegroupingError(PhalanxError):
    """The chief leaves the generation so that others can join or leave; no member is lost."""


class ElasticGroup:
    """See the module docstring. Implements `generation_loop.Participant`.

    Args:
        node: This process's place in the job.
        options: Communication options of the members.

    Attributes:
        node: This process's place in the job.
        inner: The communicator of the current generation.
        join_points: The collectives before which others may join.
        needs_state: Whether this process still needs the job's state. The owner of this object clears it.
    """

    def __init__(self, node: ElasticNode, options: CommunicationOptions):
        self.node = node
        self.join_points = JoinPoints()
        self.needs_state = node.is_candidate
        self._options = options
        self.inner: HostCommunicator = self._connect()
        self._former = Traffic()  # traffic of earlier generations
        self._completed = 0
        self._last: Any = None  # the last result, kept by `run` for members that have not finished the collective
        # For the collective that a loss interrupted: whether others may join before it, and a list with its result, if
        # another member has handed it over.
        self._boundary = True
        self._handed_over: list[Any] = []
        # Whether the next collective raises, because the last one returned a result of the previous generation.
        self._raises_next = False

    # Membership.

    @property
    def generation(self) -> int:
        return self.inner.membership.generation

    @property
    def initial_world_size(self) -> int:
        """Number of members when the job began."""
        return self.node.initial_world_size

    @property
    def is_candidate(self) -> bool:
        """Whether this process is not a member yet, and forms a world of size one."""
        return self.node.is_candidate or self.generation == 0

    @property
    def joined_late(self) -> bool:
        """Whether this process arrived after the job had begun."""
        return self.node.joined_late

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Ranks that must receive the job's state in this generation."""
        return tuple(rank for rank, address in enumerate(self.node.addresses) if address.needs_state)

    @property
    def late_joiner_ranks(self) -> frozenset[int]:
        """Ranks of this generation that became members after the job had begun."""
        return frozenset(rank for rank, address in enumerate(self.node.addresses) if address.is_late)

    @property
    def statistics(self) -> Traffic:
        """The sum over all generations; see `Communicator.statistics`."""
        return self._former.plus(self.inner.statistics)

    def join(self, entry: int) -> EntryAlreadyFinished | None:
        """As a candidate, wait until this process is a member or the members have finished this entry.

        Raises: RendezvousError if the others did not arrive, or the job has failed.
        """
        past = join_generation(self.node, self, entry)
        if past is not None:
            self.node.joined_late = True  # it reached its first entry after the job had begun
        return past

    def send_as_chief(self, message: EntryStarted | EntryFinished) -> None:
        """Report an entry to the coordinator, on the chief only."""
        if self.inner.rank == 0:
            self.node.coordinator.send(message)

    def leave_entry(self, entry: int, *, is_finished: bool) -> None:
        """Report to the coordinator that this process no longer takes part in an entry.

        Args:
            is_finished: Whether it has done its part; otherwise an exception ends its part.
        """
        with contextlib.suppress(LinkClosedError, LinkTimeoutError):  # the next collective raises an error about it
            self.node.coordinator.send(EntryLeft(entry, is_finished))

    def allow_joins(self) -> None:
        """Allow others to join after a section where they could not (`JoinPoints.blocked`).

        Raises: MembershipChangedError if others have joined.
        """
        if self.join_points.consume_blocked():
            self.run(lambda inner: inner.barrier())

    # Collectives.

    def run(
        self,
        call: Callable[[HostCommunicator], T],
        receive: Callable[[Any], T] = copy_result,
        keep: Callable[[T], Any] = copy_result,
    ) -> T:
        """Run a collective that returns the same result on all members.

        Args:
            call: The collective.
            receive: Converts what another member has handed over into the result of `call`.
            keep: Extracts the part of a result to hand over. It must not share memory that the caller may modify before
                the next collective is over.

        Raises: MembershipChangedError if the members have changed; the collective must be called again.
        """
        boundary = self.join_points.next_collective()  # consumed by this call, even if it raises below
        if self._raises_next:
            self._raises_next = False
            raise self._membership_changed()
        try:
            if boundary and self.inner.rank == 0 and self.node.is_regroup_requested:
                raise RegroupingError("others join or leave the job")
            if self.node.coordinator.is_lost:
                raise RegroupingError("the launcher is lost")  # and so is the job: no generation is formed
            result = call(self.inner)
        except (*LOSSES, RegroupingError) as error:
            self._boundary, self._handed_over = boundary, []
            form_next_generation(self.node, self, error)
            if not self._handed_over:
                raise self._membership_changed() from None
            self._raises_next = True
            return receive(self._handed_over[0])
        self._completed += 1
        self._last = keep(result)
        return result

    def run_with_barrier(self, call: Callable[[HostCommunicator], T]) -> T:
        """Run a collective whose results differ between ranks; a barrier ensures that all ranks have theirs.

        If a loss interrupts the barrier, the result of another rank is useless: this member raises, like those that
        detect the loss in the next collective. Anything computed from the result must therefore pass another collective
        before it is applied.
        """

        def with_barrier(inner: HostCommunicator) -> T:
            result = call(inner)
            inner.barrier()
            return result

        def refuse(_: Any) -> T:
            self._raises_next = False  # this call raises instead
            raise self._membership_changed()

        return self.run(with_barrier, refuse, keep=lambda result: None)

    # See `Participant`.

    def position(self) -> Position:
        if self.generation == 0:  # not in any generation yet: same as the members that formed it
            self._completed = max(0, *(address.completed for address in self.node.addresses))
        return Position(self._completed, self._boundary and not self._handed_over, self.needs_state)

    def start(self) -> None:
        config = self.node.config
        if self.generation == 0:
            self._completed = max(0, *(address.completed for address in self.node.addresses))
            if config.timeline is not None and not timeline.current.on:
                timeline_relay.start_recording(self.node, config.timeline.path)
        new = self._connect()
        self._former, self.inner = self.statistics, new  # `statistics` still includes the old `inner`
        self._hand_over()

    def abandon(self, error: Exception) -> None:
        self.inner.runner.give_up(error)
        self.inner.close()

    def _hand_over(self) -> None:
        """Give the result of the last collective to members that lack it, or receive it."""
        # Derived from what the coordinator sent to all members, newcomers included, so all take part or none.
        counts = [address.completed for address in self.node.addresses]
        known = [count for count in counts if count >= 0]
        if not known or min(known) == max(known):
            return
        if self._completed == max(known):
            # A copy: if this fails, the result may have to be handed over again, after the caller has repeated its step
            # and modified its arrays.
            kept = encode(self._last)
            self._last = decode(kept)
        root = counts.index(max(known))
        payload = self.inner.broadcast_bytes(kept if self.inner.rank == root else b"", root)
        self.inner.barrier()
        # After the barrier: a member that fails in it still lacks the result and receives it in the next generation.
        if self._completed < max(known):
            self._completed += 1
            self._last = decode(payload)
            self._handed_over = [self._last]

    def _connect(self) -> HostCommunicator:
        return connect(self.node.membership, self._options, config=self.node.config.collectives)

    def _membership_changed(self) -> MembershipChangedError:
        return MembershipChangedError(
            f"the job has {self.inner.world_size} members now (generation {self.generation}): repeat what was begun "
            f"with other members."
        )
