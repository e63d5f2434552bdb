"""The rendezvous: the tasks of a cluster find each other, compare notes, and become ranks with links.

Every task listens on its port and dials all tasks of lower rank; so each pair has one link. At the
first contact the two compare what must agree (`phalanx.cluster.compatibility`). When a task has a link to every
other, it says so to the chief; when all have, the chief answers with the list of members, and the job begins.
Until then a link that breaks is made again: processes may be restarted, in any order, minutes apart.

                        link to all others           all have said so
    gathering  ------------------------>  ready  -----------------------> joined
        ^                                   |
        +------- a link breaks -------------+

A verdict ends it early: tasks that disagree tell all others by a connection of their own (purpose `verdict`),
so that every task ends with the same message, whether it has links already or not.

On the links themselves only the chief and the others talk before the start (`_Status` up, `_Start` down).
Nobody reads a link between two others, because its first bytes may already belong to a collective of a task
that was told to start a moment earlier.

Two processes with the same task: the chief takes the first one and refuses the other, which ends with an
error. Other tasks may meet the wrong one first; they tell the newcomer to ask again, until that one is gone.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from phalanx.cluster.admission import FAILURE, serve_rendezvous
from phalanx.cluster.compatibility import JobFacts, TaskDescription
from phalanx.cluster.membership import Member, Membership, Rank
from phalanx.cluster.missing_tasks import (
    describe_owner,
    log_missing_tasks,
    run_in_threads,
    timeout_error,
    watch_for_exited_tasks,
)
from phalanx.cluster.peer_dialing import ATTEMPT_TIMEOUT_S, CHIEF_RANK, identify_task, keep_linked
from phalanx.cluster.peer_registry import PeerRegistry, TaskIdentity
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.config.job_config import JobConfig
from phalanx.errors import (
    ConfigurationError,
    DisagreementError,
    FrameError,
    LinkClosedError,
    LinkTimeoutError,
    PhalanxError,
)
from phalanx.transport.dial import RefusedError
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.ports import PortTakenError

logger = logging.getLogger(__name__)

FIRST_GENERATION = 1

FAILURE_BROADCAST_S = 2.0
"""How long a verdict is offered to tasks that do not answer, because they are just starting."""
PORT_TAKEN_PATIENCE_S = 5.0
"""How long we try again to open our port while somebody has it who does not answer: a process about to
end."""
POLL_S = 1.0
"""Longest time between two looks at the clock; whatever happens wakes the loop at once."""


class _Status(msgspec.Struct, frozen=True, tag="status"):
    """To the chief: the tasks that the sender has no link to, with the reasons. None means ready."""

    missing: dict[str, str]


class _Start(msgspec.Struct, frozen=True, tag="start"):
    """From the chief: all are ready; these are the members in rank order."""

    generation: int
    members: list[Member]


_Message = TypeVar("_Message", _Status, _Start)


def gather_members(
    spec: ClusterSpec, task: Task, facts: JobFacts, config: JobConfig, timeout_s: float
) -> tuple[Membership, Listener]:
    """Wait for all ranked tasks of the cluster and link up with them; this task's port stays open.

    Raises: as `phalanx.cluster.join`.
    """
    me = TaskIdentity(spec, task, facts, config)
    registry = PeerRegistry(me)
    listener: Listener | None = None
    started_at = time.monotonic()
    try:
        listener = _listen(me)
        serve_rendezvous(listener, me, registry)
        listener.start()
        for rank in range(me.rank):
            _start_thread(f"dial-{me.tasks[rank]}", keep_linked, me, registry, rank)
        _start_thread("notice", log_missing_tasks, me, registry, listener, timeout_s)
        _start_thread("ended", watch_for_exited_tasks, me, registry)
        membership = _gather(me, registry, started_at + timeout_s)
        if membership is None:
            raise timeout_error(me, registry, listener, timeout_s)
    except BaseException as error:
        registry.finish(joined=False)
        if isinstance(error, DisagreementError):
            _broadcast_failure(me, registry, error)
        if listener is not None:
            listener.close()
        for peer in registry.peers.values():
            peer.link.close()
        raise
    finally:
        registry.close()
    logger.info(
        "%s is rank %d of %d in generation %d, on %d host(s), after %.1f s",
        task,
        membership.rank,
        membership.world_size,
        membership.generation,
        len(membership.hosts),
        time.monotonic() - started_at,
    )
    return membership, listener


def _listen(me: TaskIdentity) -> Listener:
    patience_until = time.monotonic() + PORT_TAKEN_PATIENCE_S
    while True:
        try:
            return me.open_listener()
        except PortTakenError as error:
            owner = identify_task(me, me.task)
            if isinstance(owner, TaskDescription):
                raise ConfigurationError(describe_owner(me, owner)) from error
            if time.monotonic() >= patience_until:
                raise PortTakenError(f"{me.task} cannot start: {error} Whoever has it: {owner}.") from error
        time.sleep(0.1)


def _start_thread(name: str, target: Callable[..., None], *args: object) -> None:
    # Daemons: they end by themselves within one attempt, and nobody waits for that.
    threading.Thread(target=target, args=args, name=f"phalanx-{name}", daemon=True).start()


def _gather(me: TaskIdentity, registry: PeerRegistry, deadline: float) -> Membership | None:
    """React to what happens until the job begins; None if the time is up before."""
    progress = _ChiefProtocol(me, registry) if me.rank == CHIEF_RANK else _MemberProtocol(me, registry)
    while True:
        if verdict := registry.failure:
            raise verdict
        if start := progress.advance():
            registry.finish(joined=True)
            # One that was lost since the chief counted it has a closed link: the first collective names it.
            peers = registry.last_peers
            return Membership(
                generation=start.generation,
                rank=me.rank,
                members=tuple(start.members),
                links={rank: peers[rank].link for rank in me.other_ranks},
            )
        if time.monotonic() >= deadline:
            return None
        _wait(registry, progress.events(), min(deadline - time.monotonic(), POLL_S))


def _wait(registry: PeerRegistry, events: dict[Rank, int], timeout_s: float) -> None:
    """Until a link or the roll call has news."""
    poller = select.poll()
    poller.register(registry.wakeup, select.POLLIN)
    for rank, peer in registry.peers.items():
        with contextlib.suppress(ValueError, OSError):  # Closed a moment ago.
            poller.register(peer.link, events.get(rank, 0) | _PEER_CLOSED)
    poller.poll(1000 * max(0.0, timeout_s))
    with contextlib.suppress(BlockingIOError):
        registry.wakeup.recv(4096)


_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)


class _ChiefProtocol:
    """The chief hears from all when they are ready, and says when to start."""

    def __init__(self, me: TaskIdentity, registry: PeerRegistry):
        self._me = me
        self._registry = registry

    def events(self) -> dict[Rank, int]:
        return dict.fromkeys(self._me.other_ranks, select.POLLIN)

    def advance(self) -> _Start | None:
        for rank, peer in self._registry.peers.items():
            try:
                while (status := _receive(peer.link, _Status)) is not None:
                    peer.missing = status.missing
            except (LinkClosedError, FrameError) as error:
                self._registry.remove(rank, peer, f"was here before, but {error}")
        peers = self._registry.peers
        if len(peers) < len(self._me.other_ranks) or any(peer.missing != {} for peer in peers.values()):
            return None
        descriptions = {
            self._me.rank: self._me.description,
            **{rank: peer.description for rank, peer in peers.items()},
        }
        members = [
            Member(rank=rank, task=one.task, host=one.host, address=one.address, pid=one.pid)
            for rank, one in sorted(descriptions.items())
        ]
        start = _Start(FIRST_GENERATION, members)
        for peer in peers.values():
            # If one is lost just now, others have begun already: it is lost in the first collective.
            with contextlib.suppress(LinkClosedError, LinkTimeoutError):
                _send(peer.link, start)
        return start


class _MemberProtocol:
    """Any other task tells the chief what it misses, and starts when the chief says so."""

    def __init__(self, me: TaskIdentity, registry: PeerRegistry):
        self._me = me
        self._registry = registry
        self._last_status: tuple[Link, dict[str, str]] | None = None

    def events(self) -> dict[Rank, int]:
        return {CHIEF_RANK: select.POLLIN}

    def advance(self) -> _Start | None:
        chief = self._registry.peers.get(CHIEF_RANK)
        if chief is not None:
            try:
                # Before anything else: when the job has begun, a closed link is no reason to wait again.
                if start := _receive(chief.link, _Start):
                    return start
                self._drop_broken_links()
                missing = self._registry.missing()
                if self._last_status != (chief.link, missing):
                    _send(chief.link, _Status(missing))
                    self._last_status = (chief.link, missing)
                return None
            except (LinkClosedError, LinkTimeoutError, FrameError) as error:
                self._registry.remove(CHIEF_RANK, chief, f"was here before, but {error}")
        self._drop_broken_links()
        return None

    def _drop_broken_links(self) -> None:
        """Links to others than the chief are not read, only watched."""
        for rank, peer in self._registry.peers.items():
            if rank != CHIEF_RANK and peer.link.peer_closed():
                self._registry.remove(rank, peer, "was here before, but its process ended or its connection broke")


def _send(link: Link, message: _Status | _Start) -> None:
    # Some hundred bytes into an empty buffer.
    link.send(msgspec.msgpack.encode(message), deadline=time.monotonic() + ATTEMPT_TIMEOUT_S)


def _receive(link: Link, kind: type[_Message]) -> _Message | None:
    """The next message, None if it is not here yet."""
    try:
        header, _ = link.receive(deadline=0.0)
    except LinkTimeoutError:
        return None
    try:
        return msgspec.msgpack.decode(header, type=kind)
    except msgspec.MsgspecError as error:
        raise FrameError(f"{link.peer} sent something else than a {kind.__name__}: {error}") from error


def _broadcast_failure(me: TaskIdentity, registry: PeerRegistry, verdict: DisagreementError) -> None:
    """Tell all others why the job cannot begin; those that were not here yet are given a moment to start."""
    until = time.monotonic() + FAILURE_BROADCAST_S

    def tell(rank: Rank) -> None:
        while time.monotonic() < until:
            try:
                link, _ = me.dial(me.tasks[rank], FAILURE, str(verdict).encode(), deadline=until)
                link.close()
                return
            except RefusedError:
                return
            except PhalanxError:
                if registry.has_seen(rank):
                    return  # It has heard it before, and ended.
                time.sleep(0.05)

    run_in_threads(tell, me.other_ranks, until=until)
