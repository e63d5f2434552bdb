"""One server's part in a group of shards: it leads the group, or holds its copy.

A group is what one server of the cluster is there for: its shards of the variables, the optimizer's part for them, and
for the first group the schedule. Its leader has a link to each worker and a thread for each. A worker that dies is left
out, and may come back as another process of the same task; what its former self still sends is refused. Another process
may take the leader's place: the server itself, started again, goes on from its snapshot, or the copy on another server
leads. In both cases the workers tell it where they are.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from phalanx.cluster.admission import DISAGREEMENT, admit_worker, link_name
from phalanx.cluster.compatibility import TaskDescription, describe_disagreement
from phalanx.cluster.peer_registry import TaskIdentity
from phalanx.cluster.spec import Task
from phalanx.errors import FrameError, PeerLostError, PhalanxError, RendezvousError
from phalanx.parameter_server.server import replication
from phalanx.parameter_server.server.connected_workers import CHIEF, Worker, lost
from phalanx.parameter_server.server.recovery import TrainingRecovery
from phalanx.parameter_server.server.request_handler import RequestHandler
from phalanx.parameter_server.server.snapshots import Snapshots
from phalanx.parameter_server.server.step_schedule import StepSchedule
from phalanx.parameter_server.server.variable_store import VariableStore
from phalanx.parameter_server.server_messages import (
    AppliedUpdate,
    EndFit,
    GroupState,
    JobOver,
    LeaveJob,
    SetLearningRate,
)
from phalanx.transport.dial import RefusedError
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

PURPOSE = "parameter-server"
"""With a slash and the group's number: what a worker dials."""
LEAD = "parameter-server-lead"
"""The same from the chief, which has lost the group's leader."""
COPY = "parameter-server-copy"
"""What a leader dials, to keep a copy there."""
NOT_LEADING = "not leading"
LEADING = "leading"

RETURN_S = 60.0
"""How long the chief may be away before the job counts as lost, unless PHALANX_RETURN_TIMEOUT says."""
SNAPSHOT_S = 10.0
"""Between two snapshots: what a server may lose, against a pause of the training while it copies its values."""
SEEK_S = 0.5
"""Between two looks at whether the copy is still there."""
FIRST_SEEK_S = 0.05
"""Between two attempts to reach the other server at the start, which waits for it."""
ATTEMPT_S = 5.0
"""For one of them."""
RELINK_S = 6.0
"""Where there is a copy, workers hang up to look for who leads, and come back within PREFER_COPY_S (`client`) and some
tries. Until then a step that all make together waits for those who have gone: it would lack their samples."""
NOTICE_AFTER_S = 5.0
"""When it is said once who has not come: not sooner, since workers import a backend first."""
IDLE_S = 3600.0
"""How long a leader may say nothing to its copy, which it links to anew then. Its death is noticed."""
END_S = 5.0
"""For the threads to end when their links are closed: longer than any update takes."""


class ArrivingWorker(msgspec.Struct, frozen=True):
    """What a server says of itself that leads and asks for a copy.

    Attributes:
        fresh: it has no values yet.
        term: of its lead.
    """

    statement: TaskDescription
    fresh: bool
    term: int


class ShardGroup:
    """The listener's service for the workers of one group.

    Args:
        me: this task, with all that the workers must agree on.
        number: of the group, and of the server that is there for it.
        other: the other server of the group; None if there is no copy.
        snapshots: where to keep what another process goes on with if this one is killed; None: nowhere.
        snapshot_s: seconds between two of them.
        clock: by which workers are late.
    """

    def __init__(
        self,
        me: TaskIdentity,
        number: int,
        *,
        other: Task | None,
        snapshots: Snapshots | None,
        snapshot_s: float,
        clock: Callable[[], float],
    ):
        self._me = me
        self.number = number
        self._other = other
        self._names = tuple(str(task) for task in me.tasks)
        servers = [task for task in me.spec.tasks if task.type == me.task.type]
        is_head = number == 0
        # Without the chief no leader knows that it leads still.
        chief_return_s = me.config.return_timeout_s or RETURN_S
        self._schedule = StepSchedule(
            self._names,
            start_s=me.config.rendezvous_timeout_s,
            relink_s=RELINK_S if other is not None else 0.0,
            chief_relink_s=chief_return_s if other is not None else 0.0,
            clock=clock,
        )
        self._store = VariableStore(number, self._schedule, self._names, is_head=is_head)
        self._recovery = TrainingRecovery(me, self._store, self._schedule, snapshots, is_head=is_head, copied_by=other)
        self._serving = RequestHandler(
            me,
            self._names,
            self._store,
            self._schedule,
            self._recovery,
            is_head=is_head,
            copied=other is not None,
            wait_for_chief=self._wait_for_chief,
        )
        self._snapshot_s = snapshot_s if snapshots is not None else None
        self._changed = threading.Condition()
        self._is_own = servers[number] == me.task
        self._leading = self._is_own and other is None
        self._settled = not self._is_own or other is None  # whether it is known who leads
        self._term = 0  # one more with each change of the leader; of two that lead, the greater is right
        self._following: Link | None = None
        self._over = self._noticed = False
        self._failure = ""  # of the chief, as it says when it leaves
        self._links: dict[Worker, tuple[str, Link]] = {}
        self._links_made = itertools.count()
        self._gone: set[Worker] = set()  # those that said goodbye
        self._lost: dict[Worker, float] = {}  # those that did not, and since when
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._started = time.monotonic()
        self._applying = threading.Lock()  # a record of the leader's, or that this one leads
        self._followed_at = self._started  # when the leader was last known to be there

    def start(self) -> None:
        """Begin with what is done beside the workers' questions."""
        if self._snapshot_s is not None:
            self._run("snapshots", self._recovery.keep, self._snapshot_s, self._closing)
        if self._other is not None:
            self._run("copies", self._seek_copy)

    def _run(self, name: str, body: Callable[..., None], *args: Any) -> None:
        """A thread that `close` waits for."""
        thread = threading.Thread(target=body, args=args, name=f"phalanx-{name}", daemon=True)
        thread.start()
        with self._changed:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def close(self) -> None:
        """Hang up on everybody."""
        with self._changed:
            self._closing.set()
            links = [link for _, link in self._links.values()]
            following = self._following
            self._changed.notify_all()
        for link in [*links, *([following] if following else [])]:
            link.close()
        until = time.monotonic() + END_S
        for thread in self._threads:  # one that is in the backend when the interpreter ends would crash it
            thread.join(max(0.0, until - time.monotonic()))
        if self._over:
            self._recovery.clear()

    def wait(self, seconds: float) -> None:
        """Until something has changed here, at most so long."""
        with self._changed:
            self._changed.wait(seconds)

    def wake(self) -> None:
        """End a `wait`."""
        with self._changed:
            self._changed.notify_all()

    # How it ends.

    def is_over(self) -> bool:
        """Whether the workers of this group have said that they have no more to do.

        Raises:
            RendezvousError: the chief did not come in time.
            PeerLostError: the chief was lost and did not come back, or ended with an error.
        """
        config = self._me.config
        with self._changed:
            now, first_contact_until = time.monotonic(), self._started + config.rendezvous_timeout_s
            return_s = config.return_timeout_s or RETURN_S
            if self._over:
                return True
            if self._settled and not self._leading:
                if self._following is not None:
                    self._followed_at = now
                elif now - max(self._followed_at, first_contact_until) > return_s:
                    raise lost(str(self._other), f"training; it did not come back within {return_s:g} s")
                return False
            came = self._links.keys() | self._gone | self._lost.keys()
            if not self._noticed and self._is_own and self.number == 0 and now > self._started + NOTICE_AFTER_S:
                self._noticed = True
                if absent := [name for number, name in enumerate(self._names) if number not in came]:
                    logger.warning(
                        "%s waits, for up to %g s, for %s.",
                        self._me.task,
                        config.rendezvous_timeout_s,
                        ", ".join(absent),
                    )
            if CHIEF not in came and now > first_contact_until:
                raise RendezvousError(
                    f"{self._names[CHIEF]} did not come to {self._me.task} within "
                    f"{config.rendezvous_timeout_s:g} s. Is it started, with the same cluster?"
                )
            since = self._lost.get(CHIEF)
            if since is not None and now - since > return_s and not self._links:
                raise self._schedule.lost(CHIEF, f"training; it did not come back within {return_s:g} s")
            some_may_come = len(came) < len(self._names) and now < first_contact_until and not self._recovery.took_over
            left_out = all(self._schedule.is_evicted(incarnation) for incarnation, _ in self._links.values())
            over = self._over = CHIEF in self._gone and not some_may_come and left_out
        if over and self._other is not None:
            self._store.end_copy()  # at once: the other server waits for it, perhaps while this one waits for the other
        if over and self._failure:
            chief = self._names[CHIEF]
            raise PeerLostError(f"{chief} has ended with an error: {self._failure}", rank=CHIEF, task=chief, host="")
        return over

    # Who leads.

    def lead(self) -> None:
        """Lead from now on: the chief has lost the other server, or that one has lost its values."""
        with self._applying, self._changed:
            if self._leading:
                return
            logger.warning("%s leads the shards of group %d from now on.", self._me.task, self.number)
            self._leading = self._settled = True
            self._term += 1
            self._recovery.take_the_lead()
            if self._following is not None:
                self._following.close()
            self._changed.notify_all()

    def _step_back(self) -> None:
        """The other server leads: be its copy."""
        with self._changed:
            if self._leading:
                logger.warning("%s leads the shards of group %d no more.", self._me.task, self.number)
            self._leading, self._settled = False, True
            links = [link for _, link in self._links.values()]
            self._gone.clear()
            self._lost.clear()
            self._schedule.forget_evicted()
            self._changed.notify_all()
        for link in links:
            link.close()

    def _seek_copy(self) -> None:
        """While this leads, or would, see to it that the other server has the copy. The body of a thread."""
        assert self._other is not None
        while True:
            with self._changed:
                if self._changed.wait_for(self._closing.is_set, 0.0 if not self._settled else SEEK_S):
                    return
                wanted = (self._leading or not self._settled) and not self._over
            if not wanted or self._store.is_copied:
                continue
            newcomer = msgspec.msgpack.encode(ArrivingWorker(self._me.description, self._store.fit < 0, self._term))
            try:
                link, _ = self._me.dial(
                    self._other, f"{COPY}/{self.number}", newcomer, deadline=time.monotonic() + ATTEMPT_S
                )
            except PhalanxError as error:
                if isinstance(error, RefusedError) and error.welcome.refusal == LEADING:
                    self._step_back()
                else:  # it is starting, or gone for a while
                    time.sleep(FIRST_SEEK_S)
                continue
            if self._store.copy_to(replication.ReplicaStream(link)):
                if self._store.fit >= 0:
                    logger.warning("%s holds a copy of the shards of group %d.", self._other, self.number)
                with self._changed:
                    self._leading = self._settled = True
                    self._changed.notify_all()

    def admit_leader(self, hello: Hello) -> Welcome:
        """Whether the other server may lead this group and keep its copy here."""
        try:
            newcomer = msgspec.msgpack.decode(hello.details, type=ArrivingWorker)
        except msgspec.MsgspecError as error:
            return Welcome(refusal=DISAGREEMENT, reason=f"{hello.task} runs another version ({error}).")
        if disagreement := describe_disagreement(self._me.description, newcomer.statement):
            return Welcome(refusal=DISAGREEMENT, reason=disagreement)
        if newcomer.fresh and self._store.fit >= 0:
            self.lead()
        with self._changed:
            if self._leading and self._term >= newcomer.term:
                return Welcome(refusal=LEADING, reason=f"{self._me.task} leads group {self.number} now.")
            was_leading, self._term = self._leading, newcomer.term
        if was_leading:  # it was stopped or cut off while the chief called upon the other one
            self._step_back()
        return Welcome()

    def adopt_leader(self, hello: Hello, link: Link) -> None:
        """The other server leads, and this is its stream."""
        self._run(f"copy-of-{hello.task}", self._follow, link)

    def _follow(self, link: Link) -> None:
        """Do as the leader does, until its link ends. The body of a thread."""
        with self._applying, self._changed:
            self._following = link
        try:
            while True:
                record, buffers = replication.receive(link, IDLE_S)
                with self._applying:
                    if self._leading or self._following is not link:
                        return  # what it sent is of a former time
                    self._apply(record, buffers)
                replication.acknowledge(link)
        except replication.LOST as error:
            if not (self._closing.is_set() or self._over or self._leading):
                logger.warning("%s: %s", self._me.task, error)
        except (FrameError, msgspec.MsgspecError) as error:
            logger.warning("%s hangs up on %s: %s", self._me.task, self._other, error)
        finally:
            link.close()
            with self._changed:
                if self._following is link:
                    self._following = None

    def _apply(self, record: replication.Record, buffers: Sequence[memoryview]) -> None:
        match record:
            case GroupState():
                self._store.restore(record, buffers)
            case AppliedUpdate():
                self._store.follow(record, buffers)
            case SetLearningRate(rate):
                self._store.set_learning_rate(rate)
            case EndFit(fit):
                self._schedule.end_fit(fit)
            case JobOver():
                with self._changed:
                    self._over = True
                    self._changed.notify_all()

    # The listener's service.

    def admit(self, hello: Hello) -> Welcome:
        if not self._leading:
            return Welcome(
                refusal=NOT_LEADING, reason=f"{self._me.task} does not lead group {self.number}, or not yet."
            )
        return admit_worker(self._me, hello, range(len(self._names)), self._link_of)

    def _link_of(self, worker: Worker) -> tuple[str, Link] | None:
        present = self._links.get(worker)
        # Who was left out may be replaced.
        return None if present is None or self._schedule.is_evicted(present[0]) else present

    def adopt(self, hello: Hello, link: Link) -> None:
        worker = self._me.rank_of(hello.task)
        assert worker is not None, "checked when it was admitted"
        with self._changed:
            name = link_name(hello.incarnation, next(self._links_made))
            former_name, former = self._links.get(worker, ("", None))
            self._links[worker] = (name, link)
            self._gone.discard(worker)
            self._lost.pop(worker, None)
            self._changed.notify_all()
        self._schedule.attach(worker, name)
        if former is not None and not self._schedule.is_evicted(former_name):  # else it is told so, when it goes on
            former.close()
        self._run(hello.task, self._serve, worker, name, link)

    # One worker.

    def _serve(self, worker: Worker, incarnation: str, link: Link) -> None:
        self._store.notice()  # not in the listener's thread: the store may be busy

        def says_goodbye(bye: LeaveJob) -> None:
            if self._schedule.is_evicted(incarnation):
                return  # it speaks for nobody: another process may take its place
            with self._changed:
                self._gone.add(worker)
                if worker == CHIEF:
                    self._failure = bye.failure
                self._changed.notify_all()
            if worker == CHIEF:
                self._schedule.chief_left()
                for name in set(bye.without).intersection(self._names):
                    self._schedule.evict(self._names.index(name))

        why = ""
        try:
            why = self._serving.serve(
                worker, incarnation, link, says_goodbye=says_goodbye, is_closing=self._closing.is_set
            )
        finally:
            self._forget(worker, incarnation, link, why)

    def _forget(self, worker: Worker, incarnation: str, link: Link, why: str) -> None:
        with self._changed:
            if self._links.get(worker, ("", None))[1] is not link:
                return  # it has come back since
            del self._links[worker]
            goodbye = worker in self._gone
            if not goodbye:
                self._lost[worker] = time.monotonic()
            self._changed.notify_all()
        self._schedule.detach(worker, incarnation, goodbye=goodbye, why=why)
        self._store.notice()

    def _wait_for_chief(self) -> None:
        """Where there is a copy, it may lead by now: the one to which the chief is linked is right."""
        if self._other is None:
            return
        return_s = self._me.config.return_timeout_s or RETURN_S
        with self._changed:
            settled = self._changed.wait_for(
                lambda: not self._leading or CHIEF in self._links or CHIEF in self._gone, return_s
            )
            leading = self._leading
        if not leading:
            raise PhalanxError(f"{self._me.task} leads the shards of group {self.number} no more.")
        if not settled:
            raise self._schedule.lost(CHIEF, f"training; it did not come back within {return_s:g} s")
