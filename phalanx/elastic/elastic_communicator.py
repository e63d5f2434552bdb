"""The communicator of a job whose members come and go.

It has a `HostCommunicator` for the present generation. When a member is lost in a collective, it forms the next
generation with the others, and `MembershipChangedError` tells the caller to begin anew what it had begun.

Theory
------
*Every member raises the error at the same collective.* When a loss interrupts collective k, some may have finished it
and be in k + 1, since a member may die after some have its values. None is further: k + 1 needs all. (A broadcast
does not need its receivers; so here it ends with a barrier.) Those who have finished k keep its result and give it to
the others, whose call then returns as if nothing had happened; then k + 1 raises, on all. So programs that call the
same collectives still do, and a step is applied on all members or on none.

Others come in only where all members stand before the merge of the same training step (`boundary`); the keeper sees to
that (`cluster.elastic.keeper`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from phalanx.cluster import timeline_relay
from phalanx.cluster.membership import Membership
from phalanx.collectives.collective_thread import PendingHandle
from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.factory import connect
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.collectives.options import CommunicationOptions
from phalanx.elastic.elastic_node import ElasticNode, NotFormedError
from phalanx.elastic.membership_messages import EntryBegan, EntryFinished, LossReport, PastEntry
from phalanx.errors import CollectiveTimeoutError, LinkClosedError, MembershipChangedError, PeerLostError, PhalanxError
from phalanx.monitoring import timeline
from phalanx.transport.serialization import decode, encode

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LOSSES = (PeerLostError, CollectiveTimeoutError, LinkClosedError)


class RegroupingError(PhalanxError):
    """The chief leaves the generation, so that others can join; nobody is lost."""


class ElasticCommunicator:
    """See `communicator.Communicator` for the contract, and the top of this file for what is added.

    Attributes:
        at_boundary: whether the next collective is the merge of a training step, before which others may join.
    """

    def __init__(self, node: ElasticNode, options: CommunicationOptions):
        self._node = node
        self._options = options
        self._inner: HostCommunicator = self._connect()
        self._completed = 0
        self._last: Any = None
        self._changed = False
        self._fresh = node.candidate
        self._open = self._closed_to_others = self._was_closed = False
        self._sent = (0, 0, 0)  # bytes, bytes on links, collectives: of former generations
        self._waited_s = 0.0  # in former generations
        self.at_boundary = False

    # Who takes part.

    @property
    def membership(self) -> Membership:
        return self._inner.membership

    @property
    def kind(self) -> str:
        return self._inner.kind

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    @property
    def generation(self) -> int:
        return self.membership.generation

    @property
    def bytes_sent(self) -> int:
        return self._sent[0] + self._inner.bytes_sent

    @property
    def bytes_on_links(self) -> int:
        return self._sent[1] + self._inner.bytes_on_links

    @property
    def collectives(self) -> int:
        return self._sent[2] + self._inner.collectives

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in collectives until now. May be asked for from any thread."""
        return self._waited_s + self._inner.waited_s

    @property
    def replicas(self) -> int:
        """The number of members with which the job began."""
        return self._node.replicas

    @property
    def candidate(self) -> bool:
        """Whether this process is a world of its own until it is let in."""
        return self._node.candidate or self.generation == 0

    @property
    def late(self) -> bool:
        """Whether this process came when the job ran already."""
        return self._node.late

    def ask_about(self, entry: int) -> EntryBegan | PastEntry:
        """As a candidate: wait until the members have begun this entry, or finished it."""
        return self._node.ask_about(entry)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """The ranks that have to be given the job's state."""
        return tuple(rank for rank, place in enumerate(self._node.places) if place.fresh)

    @property
    def fresh(self) -> bool:
        """Whether this process has to be given the job's state."""
        return self._fresh

    @contextmanager
    def open_to_others(self) -> Iterator[None]:
        """While inside, others may join before any collective: the caller can go back to where all are alike."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    @contextmanager
    def closed_to_others(self) -> Iterator[None]:
        """While inside, `open_to_others` does not hold: a method begun within is not begun by those who come."""
        before, self._open = self._open, False
        self._closed_to_others = True
        try:
            yield
        finally:
            self._open = before
            self._closed_to_others, self._was_closed = False, True

    def let_others_in(self) -> None:
        """Between two things that were done with `closed_to_others`: a place where others may join.

        Raises: MembershipChangedError if they have.
        """
        if self._was_closed:
            self._was_closed = False
            self.barrier()

    def welcomed(self) -> None:
        """This process has been given the job's state."""
        self._fresh = False

    def take_part(self, entry: int) -> bytes | None:
        """As a candidate: wait to be let in at this entry (None), or until it is over (its result).

        Raises: RendezvousError if the others did not come, or the job cannot go on.
        """
        try:
            past = self._node.take_part(entry)
        except NotFormedError:
            self._completed = max(0, *(place.completed for place in self._node.places))  # as the others, who formed it
            self._form_next(boundary=True, linked=False)
            return None
        if past is not None:
            self._node.late = True  # it came to the first entry when the job had begun
        else:
            self._completed = max(0, *(place.completed for place in self._node.places))
            try:
                self._replace_inner()
            except _LOSSES as error:
                self._leave(error)
                self._form_next(boundary=True, late=_late(error))
        return past

    def began(self, entry: int, note: bytes) -> None:
        """This entry begins, and who comes later has to know this. The chief says so."""
        if self.rank == 0:
            self._node.tell(EntryBegan(entry, note))

    def done(self, entry: int, result: bytes) -> None:
        """This entry is over, with this result for those who come later. The chief says so."""
        if self.rank == 0:
            self._node.tell(EntryFinished(entry, result))

    # Collectives.

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        return self._run(lambda inner: inner.all_reduce(arrays, op, scale=scale, out=out), _into(out))

    def all_reduce_async(
        self,
        arrays: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        *,
        scale: float | Sequence[float] = 1.0,
        out: Sequence[Array] | None = None,
    ) -> PendingHandle:
        """Done when it returns: a call that may have to be begun anew cannot go on behind its caller's back."""
        handle = PendingHandle("all_reduce")
        handle._finish(self.all_reduce(arrays, op, scale=scale, out=out))
        return handle

    def run_async(self, name: str, body: Callable[[], Any]) -> PendingHandle:
        """Done when it returns, see `all_reduce_async`."""
        handle = PendingHandle(name)
        handle._finish(body())
        return handle

    def broadcast(self, arrays: Sequence[Array], root: int = 0, *, out: Sequence[Array] | None = None) -> list[Array]:
        def call(inner: HostCommunicator) -> list[Array]:
            result = inner.broadcast(arrays, root, out=out)
            inner.barrier()
            return result

        return self._run(call, _into(out))

    def broadcast_bytes(self, payload: bytes, root: int = 0) -> bytes:
        def call(inner: HostCommunicator) -> bytes:
            result = inner.broadcast_bytes(payload, root)
            inner.barrier()
            return result

        return self._run(call)

    def all_gather(self, array: Array) -> list[Array]:
        return self._run(lambda inner: inner.all_gather(array))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return self._run(lambda inner: inner.all_gather_bytes(payload))

    def reduce_scatter(self, array: Array, op: ReduceOp = ReduceOp.SUM) -> Array:
        return self._run_alone(lambda inner: inner.reduce_scatter(array, op))

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        return self._run_alone(lambda inner: inner.all_to_all(arrays))

    def barrier(self, what: str = "", nbytes: int = 0) -> None:
        return self._run(lambda inner: inner.barrier(what, nbytes))

    def close(self) -> None:
        self._inner.close()

    # Inside.

    def _run(self, call: Callable[[HostCommunicator], T], take: Callable[[Any], T] = lambda result: result) -> T:
        """A collective; `take` makes its result of what another member hands on."""
        boundary = (self.at_boundary and not self._closed_to_others) or self._open
        self.at_boundary = False
        if self._changed:
            self._changed = False
            raise self._error()
        try:
            if boundary and self.rank == 0 and self._node.asked_to_regroup:
                raise RegroupingError("the keeper wants the members to change")
            result = call(self._inner)
        except (*_LOSSES, RegroupingError) as error:
            started = timeline.now()
            self._leave(error)
            handed = self._form_next(boundary=boundary, late=_late(error))
            self._note_change(error, started)
            if handed is None:
                raise self._error() from None
            self._changed = True
            return take(handed[0])
        self._completed += 1
        self._last = result
        return result

    def _run_alone(self, call: Callable[[HostCommunicator], T]) -> T:
        """A collective whose results differ between ranks: a barrier makes sure that all have theirs.

        A member that was in the barrier still when another one was lost cannot be handed its result: it begins anew, as
        those do that meet the loss in the next collective. So what is made of the result must take another collective,
        before which nothing may be applied.
        """

        def with_barrier(inner: HostCommunicator) -> T:
            result = call(inner)
            inner.barrier()
            return result

        def refuse(_: Any) -> T:
            self._changed = False  # this tells of it
            raise self._error()

        return self._run(with_barrier, refuse)

    def _replace_inner(self) -> None:
        config = self._node.config
        if config.timeline is not None and not timeline.current.on and self.generation == 0:
            timeline_relay.start_recording(self._node, config.timeline)
        new = self._connect()
        self._sent = (self.bytes_sent, self.bytes_on_links, self.collectives)
        self._waited_s = self.waited_s
        self._inner = new

    def _connect(self) -> HostCommunicator:
        return connect(self._node.membership, self._options, config=self._node.config.collectives)

    def _leave(self, error: Exception) -> None:
        """Give the generation up, and let the others know."""
        _log.debug("rank %d leaves generation %d: %s", self.rank, self.generation, error)
        self._inner.give_up(error)
        self._inner.close()

    def _form_next(self, *, boundary: bool, late: str = "", linked: bool = True) -> list[Any] | None:
        """Form generations until one stands; the result of the collective at hand, if another member has it.

        Args:
            late, linked: why and how the present one ended, see `LossReport`.
        """
        handed: list[Any] | None = None
        while True:
            stands = boundary and handed is None
            missing = self._node.missing()
            report = LossReport(self._node.generation, self._completed, stands, self._fresh, late, missing, linked)
            late, linked = "", True
            try:
                self._node.regroup(report)
                self._replace_inner()
                given = self._hand_on()
            except NotFormedError as error:
                _log.debug("generation %d came to nothing: %s", self._node.generation, error)
                linked = False
                continue
            except _LOSSES as error:
                self._leave(error)
                late = _late(error)
                continue
            return given if handed is None else handed

    def _note_change(self, error: Exception, started_ns: int) -> None:
        args = {"generation": self.generation, "rank": self.rank, "world_size": self.world_size, "why": str(error)}
        timeline.current.complete(timeline.MEMBERSHIP, "membership change", started_ns, args)

    def _hand_on(self) -> list[Any] | None:
        """Give the last result to members that lack it, or take it, in a list of one."""
        counts = [place.completed for place in self._node.places]
        known = [count for count in counts if count >= 0]
        if not known or min(known) == max(known):
            return None
        root = counts.index(max(known))
        payload = encode(self._last) if self.rank == root else b""
        payload = self._inner.broadcast_bytes(payload, root)
        self._inner.barrier()
        if self._completed == max(known):
            return None
        self._completed += 1
        self._last = decode(payload)
        return [self._last]

    def _error(self) -> MembershipChangedError:
        return MembershipChangedError(
            f"the job has {self.world_size} members now (generation {self.generation}): what was begun with others "
            f"must be begun again."
        )


def _late(error: Exception) -> str:
    """What did not come in time, if that was the loss."""
    return str(error) if isinstance(error, CollectiveTimeoutError) else ""


def _into(out: Sequence[Array] | None) -> Callable[[list[Array]], list[Array]]:
    """Puts arrays that another member has handed on where the caller wants them."""

    def take(result: list[Array]) -> list[Array]:
        if out is None:
            return result
        for target, array in zip(out, result, strict=True):
            target[...] = array
        return list(out)

    return take
