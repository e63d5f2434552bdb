"""Decides which of a group's two servers leads it. The other one keeps the replica.

UNSETTLED -> LEADING     the other server keeps the replica
UNSETTLED -> FOLLOWING   the other server leads
LEADING   -> FOLLOWING   the other server leads with a greater term: this one was stopped or cut off
FOLLOWING -> LEADING     the chief promotes this server, or the leader has lost its values
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto

import msgspec

from phalanx.cluster.admission_control import DISAGREEMENT
from phalanx.cluster.spec import Task
from phalanx.cluster.task_comparison import TaskDescription, describe_disagreement
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.errors import FrameError, PhalanxError
from phalanx.parameter_server.server import replication
from phalanx.parameter_server.server.group_recovery import GroupRecovery
from phalanx.parameter_server.server.service_threads import ServiceThreads
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.variable_store import VariableStore
from phalanx.parameter_server.server_messages import AppliedUpdate, EndFit, GroupState, JobOver, SetLearningRate
from phalanx.parameter_server.server_protocol import LEADING, REPLICATE_PURPOSE, peer_lost
from phalanx.transport.decoding import decode_message
from phalanx.transport.dial import RefusedError
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

REPLICA_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks that the replica still exists."""
FIRST_CONTACT_INTERVAL_S = 0.05
"""Seconds between two attempts to reach the other server at the start, while workers wait for it."""
DIAL_TIMEOUT_S = 5.0
"""Seconds for one attempt."""
IDLE_TIMEOUT_S = 3600.0
"""Seconds that a leader may be silent before it must reconnect to its replica. Its death is noticed immediately."""


class GroupRole(Enum):
    """This server's role in a group. UNSETTLED: it would lead, but has not reached the other server yet."""

    UNSETTLED = auto()
    LEADING = auto()
    FOLLOWING = auto()


class LeaderOffer(msgspec.Struct, frozen=True):
    """Request of a leading server to the other one to keep the replica.

    Attributes:
        description: Description of the server's task.
        has_no_values: Whether it has no values yet.
        term: Term in which it leads.
    """

    description: TaskDescription
    has_no_values: bool
    term: int


class GroupLeadership:
    """This server's role in one group.

    Args:
        me: This task.
        number: Number of the group.
        parts: The group's variables, schedule and recovery.
        changed: Lock of the group; it protects the role, the term and the leader's link. Notified at every change.
        threads: Threads of the group.
        is_own: Whether this server is the one responsible for the group.
        other: The other server of the group; None if there is no replica.
        on_follow: Called with the lock held when the other server leads; returns the links to close.

    Attributes:
        role: See `GroupRole`.
        leader_link: Link to the leader, while this server follows.
        followed_until: Time until which the other server led, as far as is known, by the monotonic clock; initially,
            when this server was started.
        is_job_over: Whether the leader has reported that the job is over.
    """

    def __init__(
        self,
        me: TaskIdentity,
        number: int,
        parts: tuple[VariableStore, StepSchedule, GroupRecovery],
        changed: threading.Condition,
        threads: ServiceThreads,
        *,
        is_own: bool,
        other: Task | None,
        on_follow: Callable[[], Sequence[Link]],
    ):
        self._me = me
        self._number = number
        self._other = other
        self._store, self._schedule, self._recovery = parts
        self._changed = changed
        self._threads = threads
        self._on_follow = on_follow
        self.role = GroupRole.FOLLOWING if not is_own else GroupRole.LEADING if other is None else GroupRole.UNSETTLED
        self._term = 0  # grows with each change of leader; if two servers lead, the greater term is right
        self.leader_link: Link | None = None
        self.followed_until = time.monotonic()
        self.is_job_over = False
        # Held while a record from the leader is applied, and while this server becomes the leader. Acquired before
        # `changed`.
        self._applying = threading.Lock()

    @property
    def is_leading(self) -> bool:
        return self.role is GroupRole.LEADING

    def start(self) -> None:
        """Look for the other server, if there is one."""
        if self._other is not None:
            self._threads.start("replicas", self._maintain_replica)

    def become_leader(self) -> None:
        """Become the leader: the chief has lost the other server, or that server has lost its values."""
        with self._applying, self._changed:
            if self.is_leading:
                return
            logger.warning("%s leads the shards of group %d from now on.", self._me.task, self._number)
            self.followed_until = time.monotonic()
            self._term += 1
            self._recovery.become_leader()
            self.role = GroupRole.LEADING  # last: from here on, workers are admitted without this lock
            if self.leader_link is not None:
                self.leader_link.close()  # wakes `_follow`, which then applies nothing more
            self._changed.notify_all()

    def _become_follower(self) -> None:
        """Follow the other server, which leads."""
        with self._changed:
            if self.is_leading:
                logger.warning("%s no longer leads the shards of group %d.", self._me.task, self._number)
            self.role = GroupRole.FOLLOWING
            links = self._on_follow()
            self._changed.notify_all()
        for link in links:
            link.close()

    def check_leader(self, now: float, first_contact_until: float, return_timeout_s: float) -> None:
        """Raise PeerLostError if this server's leader has been gone for too long. Called with the lock held."""
        if self.leader_link is not None:
            self.followed_until = now
        elif now - max(self.followed_until, first_contact_until) > return_timeout_s:
            raise peer_lost(str(self._other), f"training; it did not return within {return_timeout_s:g} s")

    # The leader's side.

    def _maintain_replica(self) -> None:
        """Ensure that the other server keeps the replica while this one leads, or would lead. Runs in a thread."""
        assert self._other is not None
        while True:
            with self._changed:
                pause_s = 0.0 if self.role is GroupRole.UNSETTLED else REPLICA_CHECK_INTERVAL_S
                if self._changed.wait_for(self._threads.closing.is_set, pause_s):
                    return
                is_wanted = self.role is not GroupRole.FOLLOWING and not self.is_job_over
            if not is_wanted or self._store.replica.is_attached:
                continue
            offer = LeaderOffer(self._me.description, self._store.fit < 0, self._term)
            try:
                link, _ = self._me.dial(
                    self._other,
                    f"{REPLICATE_PURPOSE}/{self._number}",
                    msgspec.msgpack.encode(offer),
                    deadline=time.monotonic() + DIAL_TIMEOUT_S,
                )
            except PhalanxError as error:
                if isinstance(error, RefusedError) and error.welcome.refusal == LEADING:
                    self._become_follower()
                else:  # it is starting, or temporarily absent
                    time.sleep(FIRST_CONTACT_INTERVAL_S)
                continue
            if self._store.replica.attach(link, self._store.state):
                if self._store.fit >= 0:
                    logger.warning("%s holds a copy of the shards of group %d.", self._other, self._number)
                with self._changed:
                    # Only from UNSETTLED: the other server may have taken the lead since the replica was attached.
                    if self.role is GroupRole.UNSETTLED:
                        self.role = GroupRole.LEADING
                        self._changed.notify_all()

    # The follower's side; `admit` and `adopt` are the listener's service for the leader.

    def admit(self, hello: Hello) -> Welcome:
        """Decide whether the other server may lead this group and keep its replica here."""
        try:
            offer = decode_message(hello.details, LeaderOffer)
        except FrameError as error:
            return Welcome(refusal=DISAGREEMENT, reason=f"{hello.task} runs another version ({error}).")
        if disagreement := describe_disagreement(self._me.description, offer.description):
            return Welcome(refusal=DISAGREEMENT, reason=disagreement)
        # Without waiting for the chief: the other server has lost its values, and has not led since it started.
        if offer.has_no_values and self._store.fit >= 0:
            self.become_leader()
        with self._changed:
            was_leading = self.is_leading
            if was_leading and self._term >= offer.term:
                return Welcome(refusal=LEADING, reason=f"{self._me.task} leads group {self._number} now.")
            self._term = offer.term  # the two terms are equal from here on, until one of the servers takes the lead
        if was_leading:  # it was stopped or cut off while the chief promoted the other one
            self._become_follower()
        return Welcome()

    def adopt(self, hello: Hello, link: Link) -> None:
        """Follow the stream of the other server, which leads."""
        self._threads.start(f"replica-of-{hello.task}", self._follow, link)

    def _follow(self, link: Link) -> None:
        """Apply what the leader applies, until its link ends. Runs in a thread."""
        with self._applying, self._changed:
            self.leader_link = link
        try:
            while True:
                record, buffers = replication.receive(link, IDLE_TIMEOUT_S)
                with self._applying:
                    if self.is_leading or self.leader_link is not link:
                        return  # the record is from a former leader
                    self._apply(record, buffers)
                replication.acknowledge(link)  # only now may the leader answer its workers
        except replication.LINK_ERRORS as error:
            if not (self._threads.closing.is_set() or self.is_job_over or self.is_leading):
                logger.warning("%s: %s", self._me.task, error)
        except FrameError as error:
            logger.warning("%s hangs up on %s: %s", self._me.task, self._other, error)
        finally:
            link.close()
            with self._changed:
                if self.leader_link is link:
                    self.leader_link = None

    def _apply(self, record: replication.Record, buffers: Sequence[memoryview]) -> None:
        match record:
            case GroupState():
                self._store.restore(record, buffers)
            case AppliedUpdate():
                self._store.apply_replicated(record, buffers)
            case SetLearningRate(rate):
                self._store.set_learning_rate(rate)
            case EndFit(fit):
                self._schedule.end_fit(fit)
            case JobOver():
                with self._changed:
                    self.is_job_over = True
                    self._changed.notify_all()
