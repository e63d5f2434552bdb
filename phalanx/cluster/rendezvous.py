"""The rendezvous: the tasks of a cluster find each other, check that they agree, and become linked ranks.

Every task listens on its port and dials all tasks of lower rank, so each pair has one link. At their first contact,
two tasks compare what must agree (`phalanx.cluster.task_comparison`). A task with a link to every other task reports
that to the chief; when all have, the chief answers with the list of members, and the job begins. Until then, broken
links are replaced: processes may restart in any order, minutes apart.

                        link to all others           all have reported
    gathering  ------------------------>  ready  -----------------------> joined
        ^                                   |
        +------- a link breaks -------------+

A failure ends it early: tasks that disagree notify all others over separate connections (purpose `failure`), so that
every task raises the same message, whether it has links or not.

Before the start, only the links of the chief carry messages (`_Status` to it, `_Start` from it). The links between
other tasks are not read, because their first bytes may already belong to a collective of a task that received its
`_Start` a moment earlier.

If two processes have the same task, the chief accepts the first one and refuses the other, which raises an error.
Other tasks may meet the wrong one first; they refuse the second one temporarily, until the first one is gone.
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
from phalanx.cluster.membership import Member, Membership, Rank
from phalanx.cluster.missing_tasks import (
    describe_owner,
    log_missing_tasks,
    run_in_threads,
    timeout_error,
    watch_for_exited_tasks,
)
from phalanx.cluster.peer_dialing import ATTEMPT_TIMEOUT_S, CHIEF_RANK, identify_task, keep_linked
from phalanx.cluster.peer_registry import PeerRegistry
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import (
    ConfigurationError,
    DisagreementError,
    FrameError,
    LinkClosedError,
    LinkTimeoutError,
    PhalanxError,
)
from phalanx.transport.decoding import decode_message
from phalanx.transport.dial import RefusedError
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.ports import PortTakenError

logger = logging.getLogger(__name__)

FIRST_GENERATION = 1

FAILURE_BROADCAST_S = 2.0
"""How long a failure is offered to tasks that do not answer, because they are just starting."""
PORT_TAKEN_PATIENCE_S = 5.0
"""How long to retry opening the port while a process that does not answer holds it: it may be about to exit."""
POLL_S = 1.0
"""Longest time between two checks of the deadline; events wake the loop at once."""


class _Status(msgspec.Struct, frozen=True, tag="status"):
    """To the chief: the tasks that the sender has no link to, with the reasons. Empty if it is ready."""

    missing: dict[str, str]


class _Start(msgspec.Struct, frozen=True, tag="start"):
    """From the chief: all tasks are ready; these are the members in rank order."""

    generation: int
    members: list[Member]


_Message = TypeVar("_Message", _Status, _Start)


def gather_members(me: TaskIdentity, timeout_s: float) -> tuple[Membership, Listener]:
    """Wait for all ranked tasks of the cluster and establish links to them; this task's port stays open.

    Raises: as `phalanx.cluster.join`.
    """
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
        me.task,
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
                raise PortTakenError(f"{me.task} cannot start: {error} At that port: {owner}.") from error
        time.sleep(0.1)


def _start_thread(name: str, target: Callable[..., None], *args: object) -> None:
    # Daemons: they end within one attempt once the rendezvous is over, and are not waited for.
    threading.Thread(target=target, args=args, name=f"phalanx-{name}", daemon=True).start()


def _gather(me: TaskIdentity, registry: PeerRegistry, deadline: float) -> Membership | None:
    """React to events until the job begins; None if the deadline passes first."""
    progress = _ChiefProtocol(me, registry) if me.rank == CHIEF_RANK else _MemberProtocol(me, registry)
    while True:
        if failure := registry.failure:
            raise failure
        if start := progress.advance():
            registry.finish(joined=True)
            # A peer lost since the chief counted it has a closed link; the first collective names it.
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
    """Wait until a link or the registry changes."""
    poller = select.poll()
    poller.register(registry.wakeup, select.POLLIN)
    for rank, peer in registry.peers.items():
        with contextlib.suppress(ValueError, OSError):  # closed a moment ago
            poller.register(peer.link, events.get(rank, 0) | _PEER_CLOSED)
    poller.poll(1000 * max(0.0, timeout_s))
    with contextlib.suppress(BlockingIOError):
        registry.wakeup.recv(4096)


_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)


class _ChiefProtocol:
    """The chief's part: collects the status of all tasks and sends the start."""

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
                self._registry.remove(rank, peer, f"was present before, but {error}")
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
            # If a peer is lost just now, others may have begun already: the first collective raises PeerLostError.
            with contextlib.suppress(LinkClosedError, LinkTimeoutError):
                _send(peer.link, start)
        return start


class _MemberProtocol:
    """Every other task's part: reports its missing links to the chief and waits for the start."""

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
                # First: once the job has begun, a closed link is no reason to wait again.
                if start := _receive(chief.link, _Start):
                    return start
                self._drop_broken_links()
                missing = self._registry.missing()
                if self._last_status != (chief.link, missing):
                    _send(chief.link, _Status(missing))
                    self._last_status = (chief.link, missing)
                return None
            except (LinkClosedError, LinkTimeoutError, FrameError) as error:
                self._registry.remove(CHIEF_RANK, chief, f"was present before, but {error}")
        self._drop_broken_links()
        return None

    def _drop_broken_links(self) -> None:
        """Watch the links to tasks other than the chief, without reading them."""
        for rank, peer in self._registry.peers.items():
            if rank != CHIEF_RANK and peer.link.peer_closed():
                self._registry.remove(rank, peer, "was present before, but its process exited or its connection broke")


def _send(link: Link, message: _Status | _Start) -> None:
    # A few hundred bytes into an empty buffer.
    link.send(msgspec.msgpack.encode(message), deadline=time.monotonic() + ATTEMPT_TIMEOUT_S)


def _receive(link: Link, kind: type[_Message]) -> _Message | None:
    """The next message; None if it has not arrived yet."""
    try:
        header, _ = link.receive(deadline=0.0)
    except LinkTimeoutError:
        return None
    try:
        return decode_message(header, kind)
    except FrameError as error:
        raise FrameError(f"{link.peer} did not send a {kind.__name__}: {error}") from error


def _broadcast_failure(me: TaskIdentity, registry: PeerRegistry, failure: DisagreementError) -> None:
    """Send all other tasks the reason why the job cannot begin. Tasks not seen yet get a moment to start."""
    until = time.monotonic() + FAILURE_BROADCAST_S

    def send_failure(rank: Rank) -> None:
        while time.monotonic() < until:
            try:
                link, _ = me.dial(me.tasks[rank], FAILURE, str(failure).encode(), deadline=until)
                link.close()
                return
            except RefusedError:
                return
            except PhalanxError:
                if registry.has_seen(rank):
                    return  # it has received the failure already, and exited
                time.sleep(0.05)

    run_in_threads(send_failure, me.other_ranks, until=until)
