"""The rendezvous: the tasks of a cluster find each other, check that they agree, and become linked ranks.

A job of fixed size forms like a generation of an elastic job (`member_links`), with the chief as its coordinator. Every
task dials the chief and describes itself; the chief compares what must agree (`task_comparison`). When all tasks are
present, the chief sends them the list of members. They link to each other and report the outcome; when all have
succeeded, the chief sends the start order.

                    all are present            all have all links
    gathering  --------------------->  linking  ----------------->  started
        ^                                 |
        +--- a task is lost, or cannot ---+
             reach another one

Before the start, tasks may restart in any order, minutes apart: a task that loses the chief dials it again, and the
chief waits again for a task that it loses. A failure ends the rendezvous for all: the chief dismisses the tasks that
are present and refuses those that arrive later, so that every task raises the same message.

If two processes have the same task, the chief accepts the first one and refuses the other, which raises an error.
"""

from __future__ import annotations

import logging
import threading
import time

import msgspec

from phalanx.cluster import membership_messages as messages
from phalanx.cluster.admission_control import DISAGREEMENT, DUPLICATE, RUNNING
from phalanx.cluster.chief_rendezvous import ChiefRendezvous
from phalanx.cluster.member_links import GenerationNotFormedError, MemberLinks
from phalanx.cluster.membership import Membership
from phalanx.cluster.missing_tasks import (
    EXITED_AFTER_S,
    describe_duplicate_task,
    task_exited_error,
    timeout_error,
    watch_missing_tasks,
)
from phalanx.cluster.peer_identification import PROBE, ProbeService, identify_task
from phalanx.cluster.rendezvous_state import RendezvousState
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.task_names import CHIEF_RANK
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
from phalanx.transport.decoding import Decoder
from phalanx.transport.dial import ATTEMPT_TIMEOUT_S, HANDSHAKE_FAILURES_S, RefusedError, retry_delay_s
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.ports import PortTakenError

logger = logging.getLogger(__name__)

PORT_TAKEN_PATIENCE_S = 5.0
"""How long to retry opening the port while a process that does not answer holds it: it may be about to exit."""
POLL_S = 0.5
"""Longest interval between two checks for a failed rendezvous."""

_decoder: Decoder[messages.FromCoordinator] = Decoder(messages.FromCoordinator)


def gather_members(identity: TaskIdentity, timeout_s: float) -> tuple[Membership, Listener]:
    """Wait for all ranked tasks of the cluster and establish links to them; this task's port stays open.

    Raises: as `phalanx.cluster.join`.
    """
    started_at = time.monotonic()
    listener = _listen(identity)
    state = RendezvousState(identity, listener, timeout_s)
    try:
        listener.register(PROBE, ProbeService(identity))
        watch = threading.Thread(target=watch_missing_tasks, args=(state,), name="phalanx-missing-tasks", daemon=True)
        rendezvous = ChiefRendezvous(state) if identity.rank == CHIEF_RANK else _MemberRendezvous(state)
        listener.start()
        watch.start()
        membership = rendezvous.run()
    except BaseException:
        listener.close()
        raise
    finally:
        state.finish()
    logger.info(
        "%s is rank %d of %d in generation %d, on %d host(s), after %.1f s",
        identity.task,
        membership.rank,
        membership.world_size,
        membership.generation,
        len(membership.hosts),
        time.monotonic() - started_at,
    )
    return membership, listener


def _listen(identity: TaskIdentity) -> Listener:
    patience_until = time.monotonic() + PORT_TAKEN_PATIENCE_S
    # An owner that answers belongs to this job and stays; any other may be an exiting process of an earlier job.
    while True:
        try:
            return identity.open_listener()
        except PortTakenError as error:
            owner = identify_task(identity, identity.task)
            if isinstance(owner, TaskDescription):
                raise ConfigurationError(describe_duplicate_task(identity, owner)) from error
            if time.monotonic() >= patience_until:
                raise PortTakenError(f"{identity.task} cannot start: {error} At that port: {owner}.") from error
        time.sleep(0.1)


class _MemberRendezvous:
    """The rendezvous in every task except the chief."""

    def __init__(self, state: RendezvousState):
        self._identity, self._state = state.identity, state
        self._links = MemberLinks(self._identity)

    def run(self) -> Membership:
        while True:
            # Before the chief sees this task, and without links and orders of a previous chief.
            self._state.listener.register(messages.MESH, self._links)
            try:
                link = self._reach_chief()
                try:
                    return self._follow_orders(link)
                finally:
                    link.close()
            except (LinkClosedError, FrameError) as error:
                self._state.mark_missing(CHIEF_RANK, f"was present before, but {error}")
                self._links.close()
                self._links = MemberLinks(self._identity)
            except BaseException:
                self._links.close()
                raise

    def _reach_chief(self) -> Link:
        """Dial the chief until it accepts this task, and return the link."""
        identity, state = self._identity, self._state
        chief, details = identity.tasks[CHIEF_RANK], msgspec.msgpack.encode(identity.description)
        absent_since = time.monotonic()
        # Times since which every attempt was answered without success, or nothing listened there.
        failing_since = refused_since = None
        answer = ""  # the last one: more informative than that nothing listens there any longer
        while True:
            now = time.monotonic()
            try:
                link, _ = identity.dial(chief, messages.RENDEZVOUS, details, deadline=now + ATTEMPT_TIMEOUT_S)
                state.mark_present(CHIEF_RANK)
                return link
            except (LinkClosedError, LinkTimeoutError) as error:
                is_refused = isinstance(error.__cause__, ConnectionRefusedError)
                failing_since, refused_since = None, (refused_since or now) if is_refused else None
                cause = f"nothing listens there any longer; before: {answer}" if answer and is_refused else str(error)
            except HandshakeError as error:
                failing_since, refused_since = failing_since or now, None
                cause = answer = str(error)
                if permanent := permanent_error(error, time.monotonic() - failing_since):
                    raise permanent from error
            if (
                refused_since is not None
                and identity.config.listen_fd is not None
                and now - refused_since > EXITED_AFTER_S
            ):
                raise task_exited_error(identity, CHIEF_RANK)
            state.mark_missing(CHIEF_RANK, cause)
            self._check()
            state.wait_until_over(retry_delay_s(time.monotonic() - absent_since))

    def _follow_orders(self, link: Link) -> Membership:
        while True:
            self._check()
            try:
                order = messages.receive_one(link, _decoder, deadline=time.monotonic() + POLL_S)
            except LinkTimeoutError:
                continue
            match order:
                case messages.FormGeneration():
                    failure = ""
                    # Blocks for at most twice LINK_UP_S. Then the chief either starts the job or sends a new order.
                    try:
                        self._links.connect(order)
                    except GenerationNotFormedError as error:
                        failure = str(error)
                    messages.send(link, messages.LinkReport(order.generation, failure), ATTEMPT_TIMEOUT_S)
                case messages.StartOrder():
                    self._state.listener.unregister(messages.MESH)
                    return self._links.membership
                case messages.Dismissed(reason, cause, task):
                    if cause == DISAGREEMENT:
                        raise DisagreementError(reason)
                    raise task_exited_error(self._identity, self._identity.rank_of(task) or CHIEF_RANK)

    def _check(self) -> None:
        """Raise an error if the rendezvous has failed or timed out."""
        self._state.check()
        if time.monotonic() >= self._state.deadline:
            raise timeout_error(self._state)


def permanent_error(error: HandshakeError, failing_s: float) -> PhalanxError | None:
    """Return the error that ends the rendezvous, or None if another attempt to reach the chief may succeed.

    Args:
        error: Error of the last attempt.
        failing_s: Seconds during which all attempts have been answered without success.
    """
    if not isinstance(error, RefusedError):
        return error if failing_s >= HANDSHAKE_FAILURES_S else None
    # Any other refusal may be temporary: the port still belongs to an earlier job, or the chief does not serve yet.
    kinds = {DISAGREEMENT: DisagreementError, RUNNING: RendezvousError, DUPLICATE: ConfigurationError}
    kind = kinds.get(error.welcome.refusal)
    return None if kind is None else kind(error.welcome.reason)
