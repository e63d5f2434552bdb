"""Links to tasks of lower rank: dialled until they are established, and again when they break."""

from __future__ import annotations

import time

import msgspec

from phalanx.cluster.admission import DISAGREEMENT, DUPLICATE, MESH, PROBE, RUNNING
from phalanx.cluster.membership import Rank
from phalanx.cluster.peer_registry import Peer, PeerRegistry
from phalanx.cluster.spec import Task
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import (
    ConfigurationError,
    DisagreementError,
    FrameError,
    HandshakeError,
    LinkClosedError,
    LinkTimeoutError,
    PhalanxError,
    RendezvousError,
)
from phalanx.transport.decoding import decode_message
from phalanx.transport.dial import RefusedError, retry_delay_s
from phalanx.transport.handshake import Welcome
from phalanx.transport.link import Link

CHIEF_RANK: Rank = 0

ATTEMPT_TIMEOUT_S = 5.0
"""For one attempt to reach a task, including the handshake."""
HANDSHAKE_FAILURES_S = 10.0
"""A task that has hung up for this long has another secret or belongs to another program, so waiting is useless. Not
shorter, because a process of an earlier job may be about to free the port."""
PROBE_TIMEOUT_S = 1.0
"""To identify the task at an address, for a message: a person waits for it."""


def keep_linked(me: TaskIdentity, registry: PeerRegistry, rank: Rank) -> None:
    """Maintain a link to a task of lower rank until the rendezvous is over. The body of a thread."""
    details = msgspec.msgpack.encode(me.description)
    while registry.wait_until_absent(rank):
        absent_since = time.monotonic()
        failing_since: float | None = None
        failure: PhalanxError
        answer: HandshakeError | None = None
        while True:
            started_at = time.monotonic()
            try:
                deadline = started_at + ATTEMPT_TIMEOUT_S
                link, welcome = me.dial(me.tasks[rank], MESH, details, deadline=deadline, bulk=True)
                registry.add(rank, Peer(_decode_description(link, welcome), link))
                break
            except (LinkClosedError, LinkTimeoutError) as error:
                failing_since, failure = None, error
            except HandshakeError as error:
                failing_since, failure, answer = failing_since or started_at, error, error
                if isinstance(error, RefusedError):
                    registry.mark_seen(rank)
                if permanent := permanent_error(error, rank, time.monotonic() - failing_since):
                    registry.fail(permanent)
            has_exited = answer is not None and isinstance(failure, LinkClosedError)
            registry.set_cause(
                rank, f"nothing listens there any longer; before: {answer}" if has_exited else str(failure)
            )
            if registry.wait_until_over(retry_delay_s(time.monotonic() - absent_since)):
                return


def _decode_description(link: Link, welcome: Welcome) -> TaskDescription:
    try:
        return decode_message(welcome.details, TaskDescription)
    except FrameError as error:
        link.close()
        raise HandshakeError(f"{link.peer} runs another version of Phalanx ({error})") from error


def permanent_error(error: HandshakeError, rank: Rank, failing_s: float) -> PhalanxError | None:
    """The error that ends the rendezvous, or None if another attempt may succeed.

    Args:
        error: the result of the last attempt.
        rank: the rank that was dialled.
        failing_s: for how many seconds all attempts have been answered without success.
    """
    if isinstance(error, RefusedError):
        reason = error.welcome.reason
        refusal = error.welcome.refusal
        if refusal == DISAGREEMENT:
            return DisagreementError(reason)
        if refusal == RUNNING:
            return RendezvousError(reason)
        # The chief decides which of two processes with one task remains. Others may not know its decision yet.
        return ConfigurationError(reason) if refusal == DUPLICATE and rank == CHIEF_RANK else None
    return error if failing_s >= HANDSHAKE_FAILURES_S else None


def identify_task(me: TaskIdentity, task: Task, timeout_s: float = PROBE_TIMEOUT_S) -> TaskDescription | str:
    """The description of the task that listens at a task's address, or why there is no answer."""
    try:
        link, welcome = me.dial(task, PROBE, deadline=time.monotonic() + timeout_s)
        link.close()
        return _decode_description(link, welcome)
    except PhalanxError as error:
        return str(error)
