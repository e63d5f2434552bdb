"""The services on a task's port during the rendezvous: links of members, probes, and failures of the job."""

from __future__ import annotations

from collections.abc import Callable, Container

import msgspec

from phalanx.cluster.membership import Rank
from phalanx.cluster.peer_registry import Peer, PeerRegistry
from phalanx.cluster.task_comparison import TaskDescription, describe_disagreement
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import DisagreementError, FrameError
from phalanx.transport.decoding import decode_message
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener

MESH = "mesh"
"""Purpose of the links between members."""
PROBE = "probe"
"""Purpose of a connection that only identifies the task."""
FAILURE = "failure"
"""Purpose of a connection that reports why the job cannot begin."""

DISAGREEMENT = "disagreement"
"""Refusal: the two tasks differ in what must be equal. Permanent."""
DUPLICATE = "duplicate"
"""Refusal: another process has the same task. Permanent if it comes from the chief."""
RUNNING = "running"
"""Refusal: the job has begun with other processes. Permanent."""
LEAVING = "leaving"
"""Refusal: this task has not left the previous job of the same process yet. Temporary."""


def serve_rendezvous(listener: Listener, me: TaskIdentity, registry: PeerRegistry) -> None:
    """Register the services of the rendezvous. After it, they answer that the job is running."""
    listener.register(MESH, _MeshService(me, registry))
    listener.register(PROBE, ProbeService(me))
    listener.register(FAILURE, _FailureService(registry))


class _MeshService:
    """Accepts links from tasks of higher rank."""

    def __init__(self, me: TaskIdentity, registry: PeerRegistry):
        self._me = me
        self._registry = registry

    def admit(self, hello: Hello) -> Welcome:
        failure = self._registry.failure
        if isinstance(failure, DisagreementError):
            return Welcome(refusal=DISAGREEMENT, reason=str(failure))
        newcomer = _decode_newcomer(self._me, hello)
        if isinstance(newcomer, Welcome):
            return newcomer
        joined = self._registry.joined
        rank = self._me.rank_of(newcomer.task)
        if rank is not None:
            self._registry.mark_seen(rank)
        if disagreement := describe_disagreement(self._me.description, newcomer):
            if not joined:
                self._registry.fail(DisagreementError(disagreement))
            return Welcome(refusal=DISAGREEMENT, reason=disagreement)
        if rank is None or rank <= self._me.rank:
            return Welcome(
                refusal=DUPLICATE,
                reason=f"{newcomer.task} dialled {self._me.task}, which should have dialled it: two processes have "
                f"swapped addresses, or one of them has the wrong task.",
            )
        present = self._registry.last_peers.get(rank)
        if joined and present is not None and _is_same_process(present, newcomer):
            return Welcome(refusal=LEAVING, reason=f"{self._me.task} has not left the previous job yet")
        if joined:
            return Welcome(refusal=RUNNING, reason=_describe_running(rank, present, newcomer))
        if present is not None and _is_other_process(present, newcomer):
            return _refuse_duplicate(newcomer, f": {present.description.whereabouts}")
        return Welcome(details=msgspec.msgpack.encode(self._me.description))

    def adopt(self, hello: Hello, link: Link) -> None:
        newcomer = decode_message(hello.details, TaskDescription)
        rank = self._me.rank_of(newcomer.task)
        assert rank is not None, "checked by `admit`"
        self._registry.add(rank, Peer(newcomer, link))


def link_name(incarnation: str, number: int) -> str:
    """The name of one link of a process, so that a request over a lost link is not taken for one over its successor."""
    return f"{incarnation}#{number}"


def incarnation_of(link: str) -> str:
    """The incarnation of the process that a link name belongs to."""
    return link.partition("#")[0]


def admit_worker(
    me: TaskIdentity, hello: Hello, ranks: Container[Rank | None], link_of: Callable[[Rank], tuple[str, Link] | None]
) -> Welcome:
    """Decide whether a worker may link to this task for a purpose other than the rendezvous.

    Args:
        me: this task.
        hello: the introduction of the other task, with its `TaskDescription` as details.
        ranks: the ranks that are allowed.
        link_of: returns the name of a rank's present link, and the link. The same process may replace its link, which
            may have broken without notice here.

    Returns: the answer, with this task's description if it is positive.
    """
    newcomer = _decode_newcomer(me, hello)
    if isinstance(newcomer, Welcome):
        return newcomer
    if disagreement := describe_disagreement(me.description, newcomer):
        return Welcome(refusal=DISAGREEMENT, reason=disagreement)
    rank = me.rank_of(newcomer.task)
    if rank is None or rank not in ranks:
        return Welcome(refusal=DISAGREEMENT, reason=f"{newcomer.task} is not a worker of this cluster.")
    name, present = link_of(rank) or ("", None)
    if present is not None and incarnation_of(name) != newcomer.incarnation and not present.peer_closed():
        return _refuse_duplicate(newcomer)
    return Welcome(details=msgspec.msgpack.encode(me.description))


class ProbeService:
    """Identifies this task, before, during and after the rendezvous."""

    def __init__(self, me: TaskIdentity):
        self._me = me

    def admit(self, hello: Hello) -> Welcome:
        del hello
        return Welcome(details=msgspec.msgpack.encode(self._me.description))

    def adopt(self, hello: Hello, link: Link) -> None:
        del hello
        link.close()


class _FailureService:
    """Receives from another task why the job cannot begin."""

    def __init__(self, registry: PeerRegistry):
        self._registry = registry

    def admit(self, hello: Hello) -> Welcome:
        if self._registry.joined:
            return Welcome(refusal=RUNNING, reason="the job is running already")
        self._registry.fail(DisagreementError(hello.details.decode(errors="replace")))
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        del hello
        link.close()


def _decode_newcomer(me: TaskIdentity, hello: Hello) -> TaskDescription | Welcome:
    """The description of a task that wants to link, or the refusal if it cannot be decoded."""
    try:
        return decode_message(hello.details, TaskDescription)
    except FrameError as error:
        reason = f"{hello.task} and {me.task} run different versions of Phalanx ({error})."
        return Welcome(refusal=DISAGREEMENT, reason=f"{reason} Install the same one everywhere.")


def _refuse_duplicate(newcomer: TaskDescription, where: str = "") -> Welcome:
    return Welcome(
        refusal=DUPLICATE,
        reason=f"{newcomer.task} has joined already{where}. This process, pid {newcomer.pid} on {newcomer.host}, has "
        f"the same task: give it another task.index in TF_CONFIG, or stop the other one.",
    )


def _is_same_process(present: Peer, newcomer: TaskDescription) -> bool:
    before = present.description
    return (before.pid, before.host) == (newcomer.pid, newcomer.host) and present.link.peer_closed()


def _is_other_process(present: Peer, newcomer: TaskDescription) -> bool:
    return present.description.incarnation != newcomer.incarnation and not present.link.peer_closed()


def _describe_running(rank: Rank, present: Peer | None, newcomer: TaskDescription) -> str:
    process = f"This process, pid {newcomer.pid} on {newcomer.host},"
    if present is None or present.link.peer_closed():
        return (
            f"the job has begun, and lost {newcomer.task} (rank {rank}). {process} arrived too late to "
            f"replace it. Restart the whole job."
        )
    return (
        f"the job has begun, with {present.description.whereabouts} as rank {rank}. {process} has the same "
        f"task: give it another task.index in TF_CONFIG, or stop it."
    )
