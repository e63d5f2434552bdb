"""The rendezvous: the tasks of a cluster find each other, compare notes, and become ranks with links between
them.

Every task listens on its port and dials all tasks of lower rank; so each pair has one link. At the
first contact the two compare what must agree (`phalanx.cluster.agreement`). When a task has a link to every
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
error. Other tasks may meet the wrong one first; they tell the newcomer to ask again, until the refused one is
gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from phalanx.cluster.agreement import Facts, Statement, cluster_by_task, describe_disagreement
from phalanx.cluster.host import host_identity
from phalanx.cluster.membership import Member, Membership, Rank
from phalanx.cluster.resolvers.resolver import ClusterResolver
from phalanx.cluster.spec import EVALUATOR, PS, WORKER, ClusterSpec, Task
from phalanx.errors import (
    ConfigurationError,
    DisagreementError,
    FrameError,
    HandshakeError,
    LinkClosedError,
    LinkTimeoutError,
    PhalanxError,
    RendezvousError,
    UnsupportedError,
)
from phalanx.settings import RENDEZVOUS_TIMEOUT, Settings
from phalanx.transport.address import Address
from phalanx.transport.dial import RefusedError, dial, retry_delay_s
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener, PortTakenError, open_sockets
from phalanx.transport.tls import load_tls
from phalanx.version import __version__

logger = logging.getLogger(__name__)

MESH = "mesh"
"""Purpose of the links between members."""
PROBE = "probe"
"""Purpose of a connection that only asks who is there."""
VERDICT = "verdict"
"""Purpose of a connection that says that the job cannot begin, and why."""

DISAGREEMENT = "disagreement"
DUPLICATE = "duplicate"
RUNNING = "running"

FIRST_GENERATION = 1

NOTICE_AFTER_S = 2.0
"""When a task says who is missing: not sooner, since tasks that are started together import for seconds."""
ATTEMPT_TIMEOUT_S = 5.0
"""For one attempt to reach a task, all of the handshake included."""
PROBE_TIMEOUT_S = 1.0
"""To find out who is at an address, for a message; a person waits for it."""
SPREAD_VERDICT_S = 2.0
"""How long a verdict is offered to tasks that do not answer, because they are just starting."""
HANDSHAKE_FAILURES_S = 10.0
"""A task that hangs up on us for so long has another secret or is none of ours: no use in waiting on. A
little patience, because a process of an earlier job may be about to free the port."""
PORT_TAKEN_PATIENCE_S = 5.0
"""How long we try again to open our port while somebody has it who does not answer: a process about to
end."""


class Node:
    """This process's place in a job: its members, and the port where later connections arrive.

    Attributes:
        task: the task of this process.
        cluster_spec: the whole cluster.
        membership: the members, with links between them.
        listener: the port; None in a world of one, which needs none. Further purposes can be registered.
    """

    def __init__(
        self,
        *,
        task: Task,
        cluster_spec: ClusterSpec,
        settings: Settings,
        membership: Membership,
        listener: Listener | None,
    ):
        self.task = task
        self.cluster_spec = cluster_spec
        self.settings = settings
        self.membership = membership
        self.listener = listener

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the job: close the links and free the port. Safe to call twice."""
        self.membership.close()
        if self.listener is not None:
            self.listener.close()


def join(
    cluster: ClusterResolver | ClusterSpec,
    task: Task | None = None,
    *,
    facts: Facts | None = None,
    settings: Settings | None = None,
    timeout_s: float | None = None,
) -> Node:
    """Meet the other tasks of the cluster; returns when all of them are linked to each other.

    A cluster without any tasks, one with a single worker, and the task of an evaluator are a world of one,
    which waits for nobody. Parameter servers and evaluators never count.

    Args:
        cluster: where the cluster and this process's task come from.
        task: this process's task, if `cluster` is a spec or says something else.
        facts: what all tasks must agree on, besides the cluster and the version of Phalanx.
        settings: from the environment if not given.
        timeout_s: how long to wait for the others; PHALANX_RENDEZVOUS_TIMEOUT if not given.

    Raises:
        ConfigurationError: the cluster is described wrongly, the port is taken, or the task runs already.
        RendezvousError: tasks did not come in time; the message names them and the reasons.
        DisagreementError: tasks differ in what must be equal; raised on all of them.
        HandshakeError: a task has another secret, or something else listens at its address.
    """
    settings = settings or Settings.from_environment()
    spec = cluster if isinstance(cluster, ClusterSpec) else cluster.cluster_spec()
    if task is None and isinstance(cluster, ClusterResolver):
        task = cluster.task()
    if not spec:
        return _alone(spec, task or Task(WORKER, 0), settings)
    if task is None:
        raise ConfigurationError(
            f"the cluster has the tasks {', '.join(map(str, spec.tasks))}, but nothing says which of them "
            f"this process is. Give `task` in TF_CONFIG, or task_type and task_id to the resolver."
        )
    spec.check_member(task)
    if task.type == PS:
        raise UnsupportedError(
            f"{task} is a parameter server, which takes no part in synchronous training. Run it with "
            f"ParameterServerStrategy, or start this process as a worker."
        )
    if task.type == EVALUATOR or len(spec.ranked_tasks) == 1:
        return _alone(spec, task, settings)
    timeout_s = settings.rendezvous_timeout_s if timeout_s is None else timeout_s
    rendezvous = _Rendezvous(spec, task, facts or Facts(), settings, timeout_s)
    membership, listener = rendezvous.run()
    return Node(task=task, cluster_spec=spec, settings=settings, membership=membership, listener=listener)


def _alone(spec: ClusterSpec, task: Task, settings: Settings) -> Node:
    address = str(spec.address(task)) if task in spec else ""
    member = Member(
        rank=0, task=str(task), host=host_identity(settings.host_id), address=address, pid=os.getpid()
    )
    membership = Membership(generation=FIRST_GENERATION, rank=0, members=(member,))
    return Node(task=task, cluster_spec=spec, settings=settings, membership=membership, listener=None)


class _Status(msgspec.Struct, frozen=True, tag="status"):
    """To the chief: which tasks the sender has no link to, with the reasons. Empty means ready."""

    missing: dict[str, str]


class _Start(msgspec.Struct, frozen=True, tag="start"):
    """From the chief: all are ready; these are the members in rank order."""

    generation: int
    members: list[Member]


_Message = TypeVar("_Message", _Status, _Start)


@dataclass(slots=True)
class _Peer:
    """Another task that is here.

    Attributes:
        missing: what it last told the chief; None if nothing yet.
    """

    statement: Statement
    link: Link
    missing: dict[str, str] | None = None


class _Rendezvous:
    """One attempt to meet the others. `run` is called once, in the thread of the caller.

    The listener's thread and one thread for each task that is dialled enter links and verdicts; the caller's
    thread reacts to them.
    """

    def __init__(self, spec: ClusterSpec, task: Task, facts: Facts, settings: Settings, timeout_s: float):
        self._spec = spec
        self._task = task
        self._tasks = spec.ranked_tasks
        self._rank = self._tasks.index(task)
        self._settings = settings
        self._tls = load_tls(settings.tls)
        self._started_at = time.monotonic()
        self._timeout_s = timeout_s
        self._deadline = self._started_at + timeout_s
        self._statement = Statement(
            task=str(task),
            incarnation=secrets.token_hex(8),
            host=host_identity(settings.host_id),
            address=str(spec.address(task)),
            pid=os.getpid(),
            cluster=cluster_by_task(spec),
            phalanx=__version__,
            facts=facts,
        )
        self._others = tuple(rank for rank in range(len(self._tasks)) if rank != self._rank)
        # Protects the fields below it; notified when a peer comes or goes, and at the end.
        self._changed = threading.Condition()
        self._peers: dict[Rank, _Peer] = {}
        self._departed: dict[Rank, _Peer] = {}  # the last one with a broken link
        self._causes: dict[Rank, str] = {}  # why the last attempt to reach it failed
        self._verdict: PhalanxError | None = None
        self._joined = False
        self._over = False
        self._sent_to_chief: tuple[Link, dict[str, str]] | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)

    @property
    def _is_chief(self) -> bool:
        return self._rank == 0

    # ------------------------------------------------------------ the caller's thread

    def run(self) -> tuple[Membership, Listener]:
        listener: Listener | None = None
        try:
            listener = self._listen()
            for rank in range(self._rank):
                self._start_thread(f"dial-{self._tasks[rank]}", self._keep_dialling, rank)
            self._start_thread("notice", self._notice, listener)
            try:
                membership = self._gather()
            except RendezvousError as error:
                raise self._explain(error, listener) from None
            logger.info(
                "%s is rank %d of %d in generation %d, on %d host(s), after %.1f s",
                self._task,
                membership.rank,
                membership.world_size,
                membership.generation,
                len(membership.hosts),
                time.monotonic() - self._started_at,
            )
            return membership, listener
        except BaseException as error:
            self._end(joined=False)
            if isinstance(error, DisagreementError):
                self._spread(error)
            if listener is not None:
                listener.close()
            for peer in self._peers.values():
                peer.link.close()
            raise
        finally:
            self._wake_receiver.close()
            self._wake_sender.close()

    def _gather(self) -> Membership:
        while True:
            with self._changed:
                if self._verdict is not None:
                    raise self._verdict
            membership = self._start_all() if self._is_chief else self._ask_chief()
            if membership is not None:
                return membership
            self._drop_broken_links()
            if time.monotonic() >= self._deadline:
                raise RendezvousError("time is up")
            self._wait()

    def _wait(self) -> None:
        """Until a link has news, a thread has, or the time is up."""
        poller = select.poll()
        poller.register(self._wake_receiver, select.POLLIN)
        with self._changed:
            for rank, peer in self._peers.items():
                # From links to others than the chief nothing is read; only their end matters.
                reads = select.POLLIN if self._is_chief or rank == 0 else 0
                with contextlib.suppress(ValueError, OSError):
                    poller.register(peer.link, reads | getattr(select, "POLLRDHUP", 0))
        poller.poll(1000 * max(0.0, min(self._deadline - time.monotonic(), 1.0)))
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def _drop_broken_links(self) -> None:
        # Links that are read show their end when they are read to it; there may be a message before it.
        with self._changed:
            unread = [] if self._is_chief else [rank for rank in self._peers if rank != 0]
            broken = [rank for rank in unread if self._peers[rank].link.peer_closed()]
        for rank in broken:
            self._leave(rank, "it was here, but its process ended or its connection broke")

    def _ask_chief(self) -> Membership | None:
        """Tell the chief what has changed; the membership if it says start."""
        chief = self._peers.get(0)
        if chief is None:
            return None
        missing = self._missing()
        try:
            start = self._receive(chief.link, _Start)
            if start is None and self._sent_to_chief != (chief.link, missing):
                self._send(chief.link, _Status(missing))
                self._sent_to_chief = (chief.link, missing)
        except (LinkClosedError, FrameError) as error:
            self._leave(0, str(error))
            return None
        return self._membership(start.generation, start.members) if start is not None else None

    def _start_all(self) -> Membership | None:
        """As the chief: take in the others' status; when all are ready, start."""
        for rank, peer in list(self._peers.items()):
            try:
                while (status := self._receive(peer.link, _Status)) is not None:
                    peer.missing = status.missing
            except (LinkClosedError, FrameError) as error:
                self._leave(rank, str(error))
        with self._changed:
            peers = dict(self._peers)
        if len(peers) < len(self._others) or any(peer.missing != {} for peer in peers.values()):
            return None
        statements = {self._rank: self._statement, **{rank: peer.statement for rank, peer in peers.items()}}
        members = [
            Member(rank=rank, task=one.task, host=one.host, address=one.address, pid=one.pid)
            for rank, one in sorted(statements.items())
        ]
        for rank, peer in peers.items():
            # If one is lost right now, the others have begun already: then it is lost in the first
            # collective.
            with contextlib.suppress(LinkClosedError):
                self._send(peer.link, _Start(FIRST_GENERATION, members))
            logger.debug("%s told %s to start", self._task, self._tasks[rank])
        return self._membership(FIRST_GENERATION, members)

    def _membership(self, generation: int, members: list[Member]) -> Membership:
        self._end(joined=True)
        # One that was lost since the chief counted it has a closed link, so that the first collective names
        # it.
        peers = {**self._departed, **self._peers}
        links = {rank: peers[rank].link for rank in self._others}
        return Membership(generation=generation, rank=self._rank, members=tuple(members), links=links)

    @staticmethod
    def _send(link: Link, message: _Status | _Start) -> None:
        # Some hundred bytes to a process that reads: a second means that it is stopped.
        link.send(msgspec.msgpack.encode(message), deadline=time.monotonic() + ATTEMPT_TIMEOUT_S)

    @staticmethod
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

    def _end(self, *, joined: bool) -> None:
        with self._changed:
            self._joined = joined
            self._over = True
            self._changed.notify_all()

    # ------------------------------------------------------- who is here; any thread

    def _enter(self, rank: Rank, peer: _Peer) -> None:
        """A link to another task has been made."""
        with self._changed:
            former = self._peers.get(rank)
            late = self._over
            if not late:
                self._peers[rank] = peer
                self._causes.pop(rank, None)
                self._changed.notify_all()
        if late:
            peer.link.close()
        elif former is not None:
            former.link.close()
        self._wake()

    def _leave(self, rank: Rank, cause: str) -> None:
        """A link is broken; it will be made again."""
        with self._changed:
            peer = self._peers.pop(rank, None)
            if peer is None:
                return
            self._departed[rank] = peer
            self._causes[rank] = cause
            self._changed.notify_all()
        logger.debug("%s lost %s during the rendezvous: %s", self._task, self._tasks[rank], cause)
        peer.link.close()

    def _end_with(self, verdict: PhalanxError) -> None:
        """Let the caller's thread raise this, unless it is about to raise something else or to succeed."""
        with self._changed:
            if self._verdict is None and not self._over:
                self._verdict = verdict
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # Full, so it wakes anyway; or closed, as all is over.
            self._wake_sender.send(b"\0")

    def _missing(self) -> dict[str, str]:
        """The tasks without a link, with the reason as far as it is known."""
        with self._changed:
            return {
                str(self._tasks[rank]): self._causes.get(rank, "")
                for rank in self._others
                if rank not in self._peers
            }

    # ------------------------------------------------------------ lower ranks: dialling

    def _start_thread(self, name: str, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name=f"phalanx-{name}", daemon=True).start()

    def _hello(self, purpose: str, details: bytes = b"") -> Hello:
        return Hello(
            purpose=purpose,
            task=self._statement.task,
            job=self._settings.job_id,
            incarnation=self._statement.incarnation,
            details=details,
        )

    def _dial(self, task: Task, hello: Hello, deadline: float) -> tuple[Link, Welcome]:
        return dial(
            self._spec.address(task),
            hello,
            peer=str(task),
            secret=self._settings.secret,
            tls=self._tls,
            deadline=deadline,
        )

    def _keep_dialling(self, rank: Rank) -> None:
        """Make the link to a lower rank, and again whenever it breaks, until the rendezvous is over."""
        hello = self._hello(MESH, msgspec.msgpack.encode(self._statement))
        since = time.monotonic()
        failing_since: float | None = None
        while True:
            with self._changed:
                if rank in self._peers:
                    self._changed.wait_for(lambda: self._over or rank not in self._peers)
                    since = time.monotonic()
                if self._over:
                    return
            now = time.monotonic()
            try:
                self._dial_once(rank, hello, min(now + ATTEMPT_TIMEOUT_S, self._deadline))
                failing_since = None
                continue
            except RefusedError as error:
                self._be_refused(rank, error)
                failure: PhalanxError = error
            except (LinkClosedError, LinkTimeoutError) as error:
                failing_since = None
                failure = error
            except HandshakeError as error:
                failing_since = failing_since or now
                if time.monotonic() - failing_since >= HANDSHAKE_FAILURES_S:
                    self._end_with(error)
                failure = error
            with self._changed:
                self._causes[rank] = str(failure)
                self._changed.wait_for(lambda: self._over, timeout=retry_delay_s(time.monotonic() - since))

    def _dial_once(self, rank: Rank, hello: Hello, deadline: float) -> None:
        task = self._tasks[rank]
        link, welcome = self._dial(task, hello, deadline)
        try:
            statement = msgspec.msgpack.decode(welcome.details, type=Statement)
        except msgspec.MsgspecError as error:
            link.close()
            raise HandshakeError(f"{task} runs another version of Phalanx: {error}") from error
        self._enter(rank, _Peer(statement, link))

    def _be_refused(self, rank: Rank, error: RefusedError) -> None:
        """Refusals that will not pass end the rendezvous."""
        refusal, reason = error.welcome.refusal, error.welcome.reason
        if refusal == DISAGREEMENT:
            self._end_with(DisagreementError(reason))
        elif refusal == RUNNING:
            self._end_with(RendezvousError(reason))
        elif refusal == DUPLICATE and rank == 0:
            self._end_with(ConfigurationError(reason))

    # ---------------------------------------------------------- higher ranks: the port

    def _listen(self) -> Listener:
        address = self._spec.address(self._task)
        listener = Listener(
            self._open_port(address),
            task=str(self._task),
            secret=self._settings.secret,
            job=self._settings.job_id,
            tls=self._tls,
        )
        listener.register(MESH, _Service(self._admit, self._adopt))
        listener.register(PROBE, _Service(self._answer_probe, _hang_up))
        listener.register(VERDICT, _Service(self._hear_verdict, _hang_up))
        listener.start()
        return listener

    def _open_port(self, address: Address) -> list[socket.socket]:
        patience_until = time.monotonic() + PORT_TAKEN_PATIENCE_S
        while True:
            try:
                return open_sockets(address, secret=self._settings.secret, listen_fd=self._settings.listen_fd)
            except PortTakenError as error:
                owner = self._who_is_at(self._task)
                if isinstance(owner, Statement):
                    raise ConfigurationError(self._describe_owner(owner)) from error
                if time.monotonic() >= patience_until:
                    raise PortTakenError(f"{self._task} cannot start: {error} {_sentence(owner)}") from error
            time.sleep(0.1)

    def _describe_owner(self, owner: Statement) -> str:
        if owner.task == self._statement.task:
            return (
                f"{self._task} runs already: {owner.whereabouts} has its port, {owner.address}. Two "
                f"processes have the same task; give this one another task.index in TF_CONFIG, or end the "
                f"other one."
            )
        return (
            f"{self._task} cannot listen on its port, {self._statement.address}: {owner.whereabouts} of "
            f"this job does. The two processes have different clusters; give all tasks the same one."
        )

    def _admit(self, hello: Hello) -> Welcome:
        try:
            statement = msgspec.msgpack.decode(hello.details, type=Statement)
        except msgspec.MsgspecError as error:
            return Welcome(
                refusal=DISAGREEMENT, reason=f"{hello.task} runs another version of Phalanx: {error}"
            )
        with self._changed:
            if isinstance(self._verdict, DisagreementError):
                return Welcome(refusal=DISAGREEMENT, reason=str(self._verdict))
            joined = self._joined
        if disagreement := describe_disagreement(self._statement, statement):
            if not joined:
                self._end_with(DisagreementError(disagreement))
            return Welcome(refusal=DISAGREEMENT, reason=disagreement)
        rank = self._rank_of(statement.task)
        if rank is None or rank <= self._rank:
            return Welcome(
                refusal=DUPLICATE, reason=f"{statement.task} has no business to dial {self._task} for a link"
            )
        with self._changed:
            present = self._peers.get(rank)
        if joined:
            return Welcome(refusal=RUNNING, reason=self._describe_running(rank, statement))
        if present is not None and self._is_other_process(present, statement):
            return Welcome(
                refusal=DUPLICATE,
                reason=(
                    f"{statement.task} is here already: {present.statement.whereabouts}. This process, pid "
                    f"{statement.pid} on {statement.host}, has the same task. Give it another task.index in "
                    f"TF_CONFIG, or end the other one."
                ),
            )
        return Welcome(details=msgspec.msgpack.encode(self._statement))

    @staticmethod
    def _is_other_process(present: _Peer, newcomer: Statement) -> bool:
        return present.statement.incarnation != newcomer.incarnation and not present.link.peer_closed()

    def _describe_running(self, rank: Rank, newcomer: Statement) -> str:
        present = self._peers.get(rank)
        who = present.statement.whereabouts if present else newcomer.task
        gone = present is None or present.link.peer_closed()
        return (
            f"the job runs already, with {who} as rank {rank}"
            + (", which was lost" if gone else "")
            + f". This process, pid {newcomer.pid} on {newcomer.host}, "
            + (
                "came too late to join it."
                if gone
                else "has the same task: give it another task.index, or end it."
            )
        )

    def _adopt(self, hello: Hello, link: Link) -> None:
        statement = msgspec.msgpack.decode(hello.details, type=Statement)
        rank = self._rank_of(statement.task)
        assert rank is not None, "admitted above"
        self._enter(rank, _Peer(statement, link))

    def _rank_of(self, task: str) -> Rank | None:
        return next((rank for rank, known in enumerate(self._tasks) if str(known) == task), None)

    # ------------------------------------------------------------------ verdicts

    def _hear_verdict(self, hello: Hello) -> Welcome:
        with self._changed:
            joined = self._joined
        if joined:
            return Welcome(refusal=RUNNING, reason="the job runs already")
        self._end_with(DisagreementError(hello.details.decode(errors="replace")))
        return Welcome()

    def _spread(self, verdict: DisagreementError) -> None:
        """Tell all others why the job cannot begin; those that do not answer are given a moment to start."""
        until = time.monotonic() + SPREAD_VERDICT_S
        hello = self._hello(VERDICT, str(verdict).encode())

        def tell(rank: Rank) -> None:
            while time.monotonic() < until:
                try:
                    link, _ = self._dial(self._tasks[rank], hello, until)
                    link.close()
                    return
                except RefusedError:
                    return
                except PhalanxError:
                    time.sleep(0.05)

        _in_threads(tell, self._others, until)

    # ------------------------------------------------------- saying who is missing

    def _answer_probe(self, hello: Hello) -> Welcome:
        del hello
        return Welcome(details=msgspec.msgpack.encode(self._statement))

    def _who_is_at(self, task: Task) -> Statement | str:
        """Who listens at a task's address: its statement, or why there is none."""
        try:
            link, welcome = self._dial(task, self._hello(PROBE), time.monotonic() + PROBE_TIMEOUT_S)
            link.close()
            return msgspec.msgpack.decode(welcome.details, type=Statement)
        except PhalanxError as error:
            return str(error)
        except msgspec.MsgspecError as error:
            return f"{task} runs another version of Phalanx: {error}"

    def _look_for_missing(self) -> None:
        """Find out why higher ranks have not called, and whether another process has this task's address."""
        missing = [rank for rank in self._others if rank not in self._peers]

        def look(rank: Rank) -> None:
            found = self._who_is_at(self._tasks[rank])
            if rank == self._rank:
                if isinstance(found, Statement) and found.incarnation != self._statement.incarnation:
                    self._end_with(ConfigurationError(self._describe_owner(found)))
                return
            if rank < self._rank:
                return  # Its own thread knows best.
            if isinstance(found, Statement):
                found = (
                    f"{found.whereabouts} listens there, but has not reached {self._task} at "
                    f"{self._statement.address}"
                    if found.task == str(self._tasks[rank])
                    else f"{found.whereabouts} listens there"
                )
            with self._changed:
                self._causes[rank] = found

        _in_threads(look, [*missing, self._rank], time.monotonic() + PROBE_TIMEOUT_S + 0.5)

    def _notice(self, listener: Listener) -> None:
        """After a while, say once who is missing."""
        with self._changed:
            if self._changed.wait_for(lambda: self._over, timeout=NOTICE_AFTER_S):
                return
        self._look_for_missing()
        with self._changed:
            if self._over:
                return
        names = self._list_missing()
        if not names:
            return
        refused = listener.refusal_summary()
        logger.warning(
            "%s waits, for up to %.0f s, for:\n%s%s",
            self._task,
            self._timeout_s,
            "\n".join(f"  {name}" for name in names),
            f"\nRefused meanwhile: {refused}" if refused else "",
        )

    def _list_missing(self) -> list[str]:
        """One line for each missing task, with address and cause; what others miss, if nobody is missing
        here."""
        missing = self._missing()
        lines = [
            f"{name} at {self._spec.address(task)}: {missing[name] or 'has not called yet'}"
            for task in self._tasks
            if (name := str(task)) in missing
        ]
        if not missing and self._is_chief:
            with self._changed:
                peers = list(self._peers.values())
            for peer in peers:
                if peer.missing is None:
                    lines.append(f"{peer.statement.whereabouts}: is linked, but says nothing; is it stopped?")
                for name, cause in (peer.missing or {}).items():
                    lines.append(f"{peer.statement.task}'s link to {name}: {cause or 'not made yet'}")
        elif not missing:
            lines.append(f"{self._tasks[0]}, which waits for others")
        return lines

    def _explain(self, error: RendezvousError, listener: Listener) -> RendezvousError:
        """The error for time that is up, with all that is known; other errors as they are."""
        if time.monotonic() < self._deadline:
            return error
        self._look_for_missing()
        lines = "\n".join(f"  {line}" for line in self._list_missing())
        refused = listener.refusal_summary()
        return RendezvousError(
            f"{self._task} (rank {self._rank}, at {self._statement.address}) waited {self._timeout_s:.0f} s "
            f"for the {len(self._others)} other tasks of the job; these are missing:\n{lines}\n"
            + (f"Refused meanwhile: {refused}\n" if refused else "")
            + "Check that each was started with the same cluster and secret, that the addresses are right, "
            f"and that no firewall is between (`phalanx doctor`, run as each task, tests it). To wait "
            f"longer, raise {RENDEZVOUS_TIMEOUT}. It does not train without them."
        )


@dataclass(frozen=True, slots=True)
class _Service:
    """A `Service` of two functions."""

    admit: Callable[[Hello], Welcome]
    adopt: Callable[[Hello, Link], None]


def _hang_up(hello: Hello, link: Link) -> None:
    del hello
    link.close()


def _in_threads(function: Callable[[Rank], None], ranks: Iterable[Rank], until: float) -> None:
    """Call the function for each rank at once; returns when all are done, or the time is up."""
    threads = [
        threading.Thread(target=function, args=(rank,), name=f"phalanx-ask-{rank}", daemon=True)
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _sentence(text: str) -> str:
    return f"({text.rstrip('.')}.)"
