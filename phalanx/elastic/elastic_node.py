"""A process of a job whose members come and go: its link to the keeper, and the links to the other members."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from phalanx.cluster.compatibility import JobFacts, TaskDescription
from phalanx.cluster.host_identity import host_identity
from phalanx.cluster.membership import Member, Membership
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.config.job_config import JobConfig
from phalanx.config.variables import ELASTIC_COORDINATOR
from phalanx.elastic.membership_messages import (
    DISAGREEMENT,
    GENERATION,
    KEEPER,
    Dismissed,
    EntryBegan,
    EntryQuery,
    EntryResult,
    FormGeneration,
    FromKeeper,
    JoinRequest,
    JoinResponse,
    LeaveNotice,
    LossReport,
    MemberAddress,
    PastEntry,
    ReadyToJoin,
    RegroupRequest,
    ToKeeper,
    pack,
    unpack,
)
from phalanx.elastic.stragglers import StepTiming
from phalanx.errors import (
    DisagreementError,
    EvictedError,
    FrameError,
    HandshakeError,
    LinkClosedError,
    LinkTimeoutError,
    RendezvousError,
)
from phalanx.transport.address import Address
from phalanx.transport.dial import RefusedError, dial, retry_delay_s
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link, wait_until_delivered
from phalanx.transport.listener import Listener, open_listening_sockets
from phalanx.transport.tls import load_tls
from phalanx.version import __version__

logger = logging.getLogger(__name__)

SEND_S = 5.0
SLOWEST_BYTES_PER_S = 1e6
"""A large result takes its time on a slow network."""
OVER_GRACE_S = 0.5
"""How long a collective may go on in a generation that has ended. The links tell it at once, as a rule, and more."""
LINK_UP_S = 5.0
"""For the links of a new generation. All its members have just been heard of by the keeper."""
PULSE_S = 0.5
IDLE_S = 3600.0

_decoder: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)


class NotFormedError(Exception):
    """A generation could not link up: one of its members has gone meanwhile."""


class ElasticNode:
    """This process's place in an elastic job; has what `cluster.node.Node` has.

    Attributes:
        membership: the present generation; before the first one, a world of this process alone.
        generation, places: the number and the members of the last one that was ordered, linked up or not.
        late: whether this process came when the job ran already.
        replicas: the number of members with which the job began.
        candidate: whether this process takes no part yet in a job that has begun.
        asked_to_regroup: whether the keeper wants the present generation to end; told to the chief only.
        pulse: makes what the process says of itself, twice a second.
    """

    def __init__(self, spec: ClusterSpec, task: Task, facts: JobFacts, config: JobConfig):
        self.task = task
        self.cluster_spec = spec
        self.config = config
        self.pulse: Callable[[], StepTiming] = StepTiming
        address = spec.address(task)
        self._tls = load_tls(config.tls)
        self._statement = TaskDescription(
            task=str(task),
            incarnation=secrets.token_hex(8),
            host=host_identity(config.host_id),
            address=str(address),
            pid=os.getpid(),
            cluster={},  # members come and go: the keeper knows who there is
            phalanx=__version__,
            facts=facts,
        )
        self._arrived: dict[str, Link] = {}
        self._over = 0
        self._changed = threading.Condition()  # protects `_arrived`, `_over`
        self._links: dict[str, Link] = {}
        self._orders: queue.SimpleQueue[FormGeneration | PastEntry | EntryBegan | Dismissed | None] = (
            queue.SimpleQueue()
        )
        self._sending = threading.Lock()
        self._closed = threading.Event()
        me = Member(0, str(task), self._statement.host, str(address), os.getpid())
        self.membership = Membership(0, 0, (me,))
        self.generation = 0
        self.places: tuple[MemberAddress, ...] = ()
        self._linked: tuple[str, ...] = ()  # incarnations of `membership`
        self._unreachable: set[str] = set()
        self._asked: int | None = None
        sockets = open_listening_sockets(address, secret=config.secret, listen_fd=config.listen_fd)
        self.listener = Listener(sockets, task=str(task), secret=config.secret, job=config.job_id, tls=self._tls)
        self.listener.register(GENERATION, self)
        self.listener.start()
        try:
            self._keeper, situation = self._find_keeper()
        except BaseException:
            self.listener.close()
            raise
        self.candidate = self.late = situation.begun
        self.replicas = situation.replicas
        for name, body in (("listens", self._listen), ("pulse", self._beat)):
            threading.Thread(target=body, name=f"phalanx-{name}-{task}", daemon=True).start()

    def __enter__(self) -> ElasticNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def asked_to_regroup(self) -> bool:
        return self._asked == self.membership.generation

    # To and from the keeper.

    def tell(self, message: ToKeeper) -> None:
        """Say something to the keeper. Raises LinkClosedError if it is gone, and with it the job."""
        header, buffers = pack(message)
        deadline = time.monotonic() + SEND_S + sum(map(len, buffers)) / SLOWEST_BYTES_PER_S
        with self._sending:
            self._keeper.send(header, buffers, deadline=deadline)

    def missing(self) -> list[str]:
        """The incarnations of members that could not be reached since this was last asked."""
        state = self.membership.state
        found = self._unreachable | {self._linked[rank] for rank in state.unresponsive}
        self._unreachable = set()
        state.unresponsive.clear()
        return sorted(found)

    def ask_about(self, entry: int) -> EntryBegan | PastEntry:
        """As a candidate: wait until the members have begun this entry, or finished it."""
        self._ask(EntryQuery(entry))
        order = self._wait()
        assert isinstance(order, EntryBegan | PastEntry), "members are let in only where they said that they are ready"
        return order

    def take_part(self, entry: int) -> bytes | None:
        """As a candidate: wait until this process is a member, or the entry is over; then its result.

        Raises:
            NotFormedError: it was made a member, but the generation came to nothing: `regroup` goes on.
            RendezvousError: the others did not come, or the job cannot go on.
        """
        self._ask(ReadyToJoin(entry))
        order = self._wait()
        if isinstance(order, PastEntry):
            return order.result
        assert isinstance(order, FormGeneration)
        self.candidate = False
        self._form(order)
        return None

    def regroup(self, report: LossReport) -> None:
        """Leave the present generation; returns when the next one, to which this process belongs, is linked up.

        Raises:
            NotFormedError: the next generation came to nothing: report again.
            EvictedError, RendezvousError: this process, or the whole job, cannot go on.
        """
        self._ask(report)
        while not isinstance(order := self._wait(), FormGeneration):
            pass  # the answer to a question of before
        self._form(order)

    def _wait(self) -> FormGeneration | PastEntry | EntryBegan:
        """The next order. The keeper keeps the time: it ends a wait that is too long."""
        order = self._orders.get()
        if order is None:
            raise self._launcher_lost()
        if isinstance(order, Dismissed):
            _raise_dismissed(order)
        return order

    def _ask(self, message: ToKeeper) -> None:
        try:
            self.tell(message)
        except (LinkClosedError, LinkTimeoutError) as error:
            raise self._launcher_lost() from error

    def _launcher_lost(self) -> RendezvousError:
        return RendezvousError(
            f"{self.task} lost the launcher, which keeps the members of the job. It was killed, or the network between "
            f"is down."
        )

    def _find_keeper(self) -> tuple[Link, JoinResponse]:
        assert self.config.elastic_coordinator is not None
        address = Address.parse(self.config.elastic_coordinator, where=ELASTIC_COORDINATOR)
        started_at = time.monotonic()
        while True:
            try:
                details = msgspec.msgpack.encode(JoinRequest(msgspec.msgpack.encode(self._statement)))
                link, welcome = self._dial(address, "the launcher", KEEPER, details)
                return link, msgspec.msgpack.decode(welcome.details, type=JoinResponse)
            except RefusedError as error:
                kind = DisagreementError if error.welcome.refusal == DISAGREEMENT else RendezvousError
                raise kind(error.welcome.reason) from error
            except (LinkClosedError, LinkTimeoutError) as error:
                waited_s = time.monotonic() - started_at
                if waited_s > self.config.rendezvous_timeout_s:
                    raise RendezvousError(f"{self.task} cannot reach the launcher at {address}: {error}") from error
                time.sleep(retry_delay_s(waited_s))

    def _dial(
        self, address: Address, peer: str, purpose: str, details: bytes = b"", *, deadline: float | None = None
    ) -> tuple[Link, Welcome]:
        hello = Hello(
            purpose=purpose,
            task=self._statement.task,
            job=self.config.job_id,
            incarnation=self._statement.incarnation,
            details=details,
        )
        if deadline is None:
            deadline = time.monotonic() + LINK_UP_S
        return dial(address, hello, peer=peer, secret=self.config.secret, tls=self._tls, deadline=deadline)

    def _listen(self) -> None:
        while True:
            try:
                order = unpack(_decoder, *self._keeper.receive(deadline=time.monotonic() + IDLE_S))
            except LinkTimeoutError:
                continue
            except (LinkClosedError, FrameError, msgspec.MsgspecError) as error:
                logger.debug("the link to the keeper ended: %s", error)
                self._orders.put(None)
                return
            if isinstance(order, RegroupRequest):
                self._asked = order.generation
            elif isinstance(order, EntryResult):
                self._end(order.generation)
            else:
                self._orders.put(order)

    def _end(self, generation: int) -> None:
        """A generation has ended: whoever waits in it, for links or in a collective, gives up."""
        with self._changed:
            self._over = generation
            if self.membership.generation == generation:
                self.membership.state.abort_at = time.monotonic() + OVER_GRACE_S
            self._changed.notify_all()

    def _beat(self) -> None:
        while not self._closed.wait(PULSE_S):
            try:
                self.tell(self.pulse())
            except (LinkClosedError, LinkTimeoutError):
                return  # `_listen` hears of it

    # The links of a generation.

    def admit(self, hello: Hello) -> Welcome:
        del hello  # it knows the secret; whether it is a member is for the keeper to say
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        with self._changed:
            former = self._arrived.pop(hello.incarnation, None)
            self._arrived[hello.incarnation] = link
            self._changed.notify_all()
        if former is not None:
            former.close()

    def _form(self, order: FormGeneration) -> None:
        """Link up with the members of a generation. Of two without a link, the one of higher rank dials."""
        me = self._statement.incarnation
        self.generation = order.generation
        self.places = tuple(order.members)
        rank = next(rank for rank, place in enumerate(order.members) if place.incarnation == me)
        useful = {place.incarnation for place in order.members}
        useful -= {incarnation for pair in order.broken if me in pair for incarnation in pair}
        for incarnation in [i for i in self._links if i not in useful]:
            self._links.pop(incarnation).close()
        for incarnation in [i for i, link in self._links.items() if link.closed or link.peer_closed()]:
            self._links.pop(incarnation).close()  # both live, so it was the network
        former = [place.incarnation for place in order.members if place.completed >= 0]
        deadline = time.monotonic() + LINK_UP_S
        for other, place in enumerate(order.members):
            if other == rank or (place.incarnation in self._links and place.incarnation in former):
                continue
            link = self._link_to(place, deadline) if other < rank else self._link_from(place, deadline)
            self._links[place.incarnation] = link
        if order.generation == 1:
            self.replicas = len(order.members)
        membership = Membership(
            generation=order.generation,
            rank=rank,
            members=tuple(Member(r, p.task, p.host, p.address, p.pid) for r, p in enumerate(order.members)),
            links={r: self._links[p.incarnation] for r, p in enumerate(order.members) if r != rank},
        )
        with self._changed:
            if self._over >= order.generation:
                membership.state.abort_at = time.monotonic()
            self.membership = membership
        self._linked = tuple(place.incarnation for place in order.members)

    def _link_to(self, place: MemberAddress, deadline: float) -> Link:
        address = Address.parse(place.address, where=place.task)
        try:
            link, _ = self._dial(address, place.task, GENERATION, deadline=deadline)
        except (LinkClosedError, LinkTimeoutError, HandshakeError) as error:
            self._unreachable.add(place.incarnation)
            raise NotFormedError(f"{place.task} cannot be reached: {error}") from error
        return link

    def _link_from(self, place: MemberAddress, deadline: float) -> Link:

        def arrived() -> bool:
            # Not one of an attempt before this, which the other end has given up.
            link = self._arrived.get(place.incarnation)
            return link is not None and not link.peer_closed()

        with self._changed:
            self._changed.wait_for(
                lambda: arrived() or self._over >= self.generation, timeout=deadline - time.monotonic()
            )
            if arrived():
                return self._arrived.pop(place.incarnation)
            if self._over >= self.generation:
                raise NotFormedError("another member of the generation was lost")
            self._unreachable.add(place.incarnation)
            raise NotFormedError(f"{place.task} did not link up")

    # The end.

    def close(self, *, flush: bool = True) -> None:
        """Leave the job; safe to call twice.

        Args:
            flush: this process has finished. Else it is lost to the others.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(LinkClosedError, LinkTimeoutError):
            if flush:
                self.tell(LeaveNotice())
            self._keeper.finish()
        if flush:
            wait_until_delivered([*self._links.values(), self._keeper])
        self._keeper.close()
        self.listener.close()
        for link in (*self._links.values(), *self._arrived.values()):
            link.close()


def _raise_dismissed(order: Dismissed) -> NoReturn:
    if order.cause == "evicted":
        raise EvictedError(f"This worker takes no part in the job any more: {order.reason}.")
    if order.cause == "failed":
        raise RendezvousError(f"The job cannot go on: {order.reason}.")
    # It was in time for nothing, or one too many: that is no failure.
    logger.info("this worker is not needed any more: %s", order.reason)
    raise SystemExit(0)
