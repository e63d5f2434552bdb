"""One server's part in a group of shards: it leads the group, or holds its copy.

A group is what one server of the cluster is there for: its shards of the variables, the optimizer's part for them, and
for the first group the schedule. Its leader has a link to each worker and a thread for each. A worker that dies is left
out, and may come back as another process of the same task; what its former self still sends is refused. Another process
may take the leader's place: the server itself, started again, goes on from its snapshot, or the copy on another server
leads. In both cases the workers tell it where they are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.cluster.admission import DISAGREEMENT, admit_worker
from phalanx.cluster.agreement import Statement, describe_disagreement
from phalanx.cluster.roll_call import Identity
from phalanx.cluster.spec import Task
from phalanx.errors import (
    EvictedError,
    FrameError,
    LinkClosedError,
    LinkTimeoutError,
    PeerLostError,
    PhalanxError,
    RendezvousError,
)
from phalanx.parameter_server import copying
from phalanx.parameter_server.lanes import TO_SERVER, Lanes
from phalanx.parameter_server.messages import (
    Answer,
    Applied,
    Attach,
    BeginSession,
    Bye,
    Collect,
    Declare,
    Done,
    EndFit,
    FitOver,
    Hold,
    IsOver,
    NoBatch,
    OpenEpoch,
    Order,
    Over,
    Pull,
    PullOptimizer,
    PullRows,
    PullTables,
    Push,
    Question,
    Refusal,
    Rejoin,
    Report,
    SetRate,
    Share,
    Sharing,
    State,
    Take,
    Values,
    arrays_of,
    dtypes_of,
)
from phalanx.parameter_server.rows import NUMBER
from phalanx.parameter_server.schedule import CHIEF, Schedule, Worker, lost
from phalanx.parameter_server.snapshot import Snapshots
from phalanx.parameter_server.store import Store
from phalanx.transport.dial import RefusedError
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

PURPOSE = "parameter-server"
"""With a slash and the group's number: what a worker dials."""
LEAD = "parameter-server-lead"
"""The same from the chief, which has lost the group's leader."""
COPY = "parameter-server-copy"
"""What a leader dials, to keep a copy there."""
NOT_LEADING = "not leading"
LEADING = "leading"

IDLE_S = 3600.0
"""How long a link may say nothing: a worker may compile, or its program do something else. Its death is noticed."""
SEND_S = 60.0
"""How long a worker may take to read an answer. One that is stopped holds up its own thread only."""
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
END_S = 5.0
"""For the threads to end when their links are closed: longer than any update takes."""

_QUESTIONS = msgspec.msgpack.Decoder(Question)
_STATES = msgspec.msgpack.Decoder(State)
_encode = msgspec.msgpack.Encoder().encode


class Newcomer(msgspec.Struct, frozen=True):
    """What a server says of itself that wants to lead and asks for a copy: `fresh` if it has no values yet."""

    statement: Statement
    fresh: bool


class Group:
    """The listener's service for the workers of one group.

    Args:
        me: this task, with all that the workers must agree on.
        number: of the group, and of the server that is there for it.
        other: the other server of the group; None if there is no copy.
        snapshots: where to keep what another process goes on with if this one is killed; None: nowhere.
        snapshot_s: seconds between two of them.
    """

    def __init__(
        self, me: Identity, number: int, *, other: Task | None, snapshots: Snapshots | None, snapshot_s: float
    ):
        self._me = me
        self.number = number
        self._other = other
        self._names = tuple(str(task) for task in me.tasks)
        servers = [task for task in me.spec.tasks if task.type == me.task.type]
        self._is_head = number == 0
        self._schedule = Schedule(self._names, start_s=me.settings.rendezvous_timeout_s)
        self._store = Store(number, self._schedule, self._names, is_head=self._is_head)
        self._changed = threading.Condition()
        self._is_own = servers[number] == me.task
        self._leading = self._is_own and other is None
        self._settled = not self._is_own or other is None  # whether it is known who leads
        self._following: Link | None = None
        self._over = False
        self._links: dict[Worker, tuple[str, Link]] = {}
        self._gone: set[Worker] = set()  # those that said goodbye
        self._lost: dict[Worker, float] = {}  # those that did not, and since when
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._started = time.monotonic()
        # What came before this process leads, if anything did.
        self._snapshots = snapshots
        self._snapshot_s = snapshot_s
        self._found = None if snapshots is None else snapshots.newest()
        self._restoring = threading.Lock()
        self._applying = threading.Lock()  # a record of the leader's, or that this one leads
        self._took_over = False  # whether another process led before, in the middle of the job
        self._must_rebuild = False  # whether the schedule must be made anew
        self._restored = 0  # the version with which this went on
        self._lost_updates = 0
        self._followed_at = self._started  # when the leader was last known to be there

    def start(self) -> None:
        """Begin with what is done beside the workers' questions."""
        if self._snapshots is not None:
            self._run("snapshots", self._keep)
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
            self._closing = True
            links = [link for _, link in self._links.values()]
            following = self._following
            self._changed.notify_all()
        for link in [*links, *([following] if following else [])]:
            link.close()
        until = time.monotonic() + END_S
        for thread in self._threads:  # one that is in the backend when the interpreter ends would crash it
            thread.join(max(0.0, until - time.monotonic()))
        if self._snapshots is not None and self._over:
            self._snapshots.clear()

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
            PeerLostError: the chief was lost and did not come back.
        """
        settings = self._me.settings
        with self._changed:
            now, first_contact_until = time.monotonic(), self._started + settings.rendezvous_timeout_s
            return_s = settings.return_timeout_s or RETURN_S
            if self._over:
                return True
            if self._settled and not self._leading:
                if self._following is not None:
                    self._followed_at = now
                elif now - max(self._followed_at, first_contact_until) > return_s:
                    raise lost(str(self._other), f"training; it did not come back within {return_s:g} s")
                return False
            came = self._links.keys() | self._gone | self._lost.keys()
            if CHIEF not in came and now > first_contact_until:
                raise RendezvousError(
                    f"{self._names[CHIEF]} did not come to {self._me.task} within "
                    f"{settings.rendezvous_timeout_s:g} s. Is it started, with the same cluster?"
                )
            since = self._lost.get(CHIEF)
            if since is not None and now - since > return_s and not self._links:
                raise lost(self._names[CHIEF], f"training; it did not come back within {return_s:g} s")
            some_may_come = len(came) < len(self._names) and now < first_contact_until and not self._took_over
            left_out = all(self._schedule.is_evicted(incarnation) for incarnation, _ in self._links.values())
            over = self._over = CHIEF in self._gone and not some_may_come and left_out
        if over and self._other is not None:
            self._store.end_copy()  # at once: the other server waits for it, perhaps while this one waits for the other
        return over

    # Who leads.

    def lead(self) -> None:
        """Lead from now on: the chief has lost the other server, or that one has lost its values."""
        with self._applying, self._changed:
            if self._leading:
                return
            logger.warning("%s leads the shards of group %d from now on.", self._me.task, self.number)
            self._leading = self._settled = True
            self._took_over = self._must_rebuild = self._store.fit >= 0
            self._restored, self._lost_updates = self._store.version, 0
            self._schedule.await_workers()
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
            self._changed.notify_all()
        for link in links:
            link.close()

    def _seek_copy(self) -> None:
        """While this leads, or would, see to it that the other server has the copy. The body of a thread."""
        assert self._other is not None
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, 0.0 if not self._settled else SEEK_S):
                    return
                wanted = (self._leading or not self._settled) and not self._over
            if not wanted or self._store.is_copied:
                continue
            newcomer = msgspec.msgpack.encode(Newcomer(self._me.statement, self._store.fit < 0))
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
            if self._store.copy_to(copying.Copy(link)):
                if self._store.fit >= 0:
                    logger.warning("%s holds a copy of the shards of group %d.", self._other, self.number)
                with self._changed:
                    self._leading = self._settled = True
                    self._changed.notify_all()

    def admit_leader(self, hello: Hello) -> Welcome:
        """Whether the other server may lead this group and keep its copy here."""
        try:
            newcomer = msgspec.msgpack.decode(hello.details, type=Newcomer)
        except msgspec.MsgspecError as error:
            return Welcome(refusal=DISAGREEMENT, reason=f"{hello.task} runs another version ({error}).")
        if disagreement := describe_disagreement(self._me.statement, newcomer.statement):
            return Welcome(refusal=DISAGREEMENT, reason=disagreement)
        if newcomer.fresh and self._store.fit >= 0:
            self.lead()
        if self._leading:
            return Welcome(refusal=LEADING, reason=f"{self._me.task} leads group {self.number} now.")
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
                record, buffers = copying.receive(link, IDLE_S)
                with self._applying:
                    if self._leading or self._following is not link:
                        return  # what it sent is of a former time
                    self._apply(record, buffers)
                copying.acknowledge(link)
        except copying.LOST as error:
            if not (self._closing or self._over or self._leading):
                logger.warning("%s: %s", self._me.task, error)
        except (FrameError, msgspec.MsgspecError) as error:
            logger.warning("%s hangs up on %s: %s", self._me.task, self._other, error)
        finally:
            link.close()
            with self._changed:
                if self._following is link:
                    self._following = None

    def _apply(self, record: copying.Record, buffers: Sequence[memoryview]) -> None:
        match record:
            case State():
                self._store.restore(record, buffers)
            case Applied():
                self._store.follow(record, buffers)
            case SetRate(rate):
                self._store.set_learning_rate(rate)
            case EndFit(fit):
                self._schedule.end_fit(fit)
            case Over():
                with self._changed:
                    self._over = True
                    self._changed.notify_all()

    # Snapshots, and going on from one.

    def _keep(self) -> None:
        """Write a snapshot every so often. The body of a thread."""
        written = -1
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, self._snapshot_s):
                    return
            version = self._store.version
            if version != written and self._write_snapshot():
                written = version

    def _write_snapshot(self) -> bool:
        """Whether there is one of what this has now."""
        with self._restoring:  # one at a time, each of newer values than the one before
            state = self._store.state()
            if self._snapshots is None or state is None:
                return False
            try:
                self._snapshots.write(msgspec.msgpack.encode(state[0]), state[1])
            except OSError as error:
                logger.warning(
                    "%s cannot write its snapshot (%s); if it is killed, more updates will be lost.",
                    self._me.task,
                    error.strerror or error,
                )
                return False
        return True

    def _take_back(self, worker: Worker, message: Rejoin, buffers: Sequence[memoryview]) -> None:
        """A worker has lost its link to this task in the middle of a `fit`, perhaps because the process is new."""
        with self._restoring:
            if self._store.fit < message.fit:
                self._restore(message)
            scheduled = self._is_head and message.epoch >= 0 and message.era == self._schedule.era
            if self._must_rebuild and scheduled and not self._schedule.has_ended(message.fit):
                self._schedule.await_rejoins()
            self._must_rebuild = False
            missing = max(0, message.version - self._restored)
            if self._took_over and missing > self._lost_updates:
                self._lost_updates = missing
                self._store.outrun(message.version)
                logger.warning("%s: %d updates of its variables are lost.", self._me.task, self._lost_updates)
        if scheduled:
            order = np.frombuffer(buffers[0], np.int64) if buffers else None
            self._schedule.rejoin(worker, message, order)

    def _restore(self, message: Rejoin) -> None:
        found = self._found
        state = None if found is None else _STATES.decode(found[0])
        if found is None or state is None or (state.declared.fit, state.era) < (message.fit, message.era):
            raise PeerLostError(
                f"{self._me.task} was killed and started again, and has no snapshot of this training. Pass "
                f"snapshot_dir or replication=2 to ParameterServerStrategy, or start the job with `phalanx run`.",
                rank=-1,
                task=str(self._me.task),
                host="",
            )
        self._store.restore(state, found[1])
        self._found = None
        self._took_over = self._must_rebuild = True
        self._schedule.await_workers()
        self._restored, self._lost_updates = state.version, -1  # even none is worth a line
        logger.warning("%s goes on from its snapshot.", self._me.task)

    # The listener's service.

    def admit(self, hello: Hello) -> Welcome:
        if not self._leading:
            return Welcome(
                refusal=NOT_LEADING, reason=f"{self._me.task} does not lead group {self.number}, or not yet."
            )
        return admit_worker(self._me, hello, range(len(self._names)), self._link_of)

    def _link_of(self, worker: Worker, newcomer: Statement) -> Link | None:
        return self._links.get(worker, (None, None))[1]

    def adopt(self, hello: Hello, link: Link) -> None:
        worker = self._me.rank_of(hello.task)
        assert worker is not None, "checked when it was admitted"
        with self._changed:
            self._links[worker] = (hello.incarnation, link)
            self._gone.discard(worker)
            self._lost.pop(worker, None)
            self._changed.notify_all()
        self._schedule.attach(worker, hello.incarnation)
        self._run(hello.task, self._serve, worker, hello.incarnation, link)

    # One worker.

    def _serve(self, worker: Worker, incarnation: str, link: Link) -> None:
        self._store.notice()  # not in the listener's thread: the store may be busy
        lanes: Lanes | None = None
        try:
            while True:
                header, buffers = link.receive(deadline=time.monotonic() + IDLE_S)
                question = _QUESTIONS.decode(header)
                if isinstance(question, Bye):
                    with self._changed:
                        self._gone.add(worker)
                        self._changed.notify_all()
                    if worker == CHIEF:
                        self._schedule.chief_left()
                    _answer(link, Done())
                    return
                if isinstance(question, Share):
                    made = Lanes.accept(question.offer)
                    lanes = made or lanes
                    _answer(link, Sharing(made is not None))
                    continue
                if isinstance(question, Push) and question.lengths:
                    if lanes is None:
                        raise FrameError("gradients in memory that is not shared")
                    buffers = lanes.read(TO_SERVER, question.lengths)
                try:
                    if self._schedule.is_evicted(incarnation):
                        raise EvictedError(
                            f"{self._names[worker]} made no progress for too long and was left out; the others went "
                            f"on. Start it again to take part."
                        )
                    answer, arrays = self._handle(worker, incarnation, question, buffers)
                except PhalanxError as error:
                    answer, arrays = Refusal(type(error).__name__, str(error)), []
                except Exception as error:
                    logger.exception("%s cannot do what %s asked", self._me.task, self._names[worker])
                    answer, arrays = Refusal("PhalanxError", f"{self._me.task} failed: {error!r}"), []
                if lanes is not None and isinstance(answer, Values) and isinstance(question, Push | Pull):
                    place = lanes.next_place()
                    lengths = lanes.write(place, arrays)
                    if lengths:
                        answer, arrays = msgspec.structs.replace(answer, lengths=lengths, place=place), ()
                _answer(link, answer, arrays, max(SEND_S, self._me.settings.timeout_s))
        except (LinkClosedError, LinkTimeoutError) as error:
            if not self._closing:
                logger.warning("%s: %s", self._me.task, error)
        except (FrameError, msgspec.MsgspecError) as error:
            logger.warning("%s hangs up on %s: %s", self._me.task, self._names[worker], error)
        finally:
            link.close()
            if lanes is not None:
                lanes.close()
            self._forget(worker, incarnation, link)

    def _forget(self, worker: Worker, incarnation: str, link: Link) -> None:
        with self._changed:
            if self._links.get(worker, ("", None))[1] is not link:
                return  # it has come back since
            del self._links[worker]
            goodbye = worker in self._gone
            if not goodbye:
                self._lost[worker] = time.monotonic()
            self._changed.notify_all()
        self._schedule.detach(worker, incarnation, goodbye=goodbye)
        self._store.notice()

    def _handle(
        self, worker: Worker, incarnation: str, question: Question, buffers: Sequence[memoryview]
    ) -> tuple[Answer, Sequence[Array]]:
        store, schedule = self._store, self._schedule
        timeout_s = self._me.settings.timeout_s
        if not isinstance(question, Rejoin | Declare | SetRate | BeginSession):
            schedule.wait_until_rebuilt(worker, timeout_s)
        match question:
            case Rejoin():
                self._take_back(worker, question, buffers)
            case Push():
                self._wait_for_chief()
                version, values, rows, extras, note = store.push(question, buffers)
                if not store.is_copied:
                    self._wait_for_chief()  # the copy may lead by now, and have been lost for that reason
                ticket = None
                if self._is_head and question.gradients:
                    now = question.ticket
                    ticket = schedule.try_take(worker, incarnation, now.fit, now.epoch, now.era)
                arrays = [*values, *rows, *extras]
                step = schedule.global_step
                alone = self._other is not None and not store.is_copied
                answer = Values(
                    version, step, dtypes_of(arrays), len(values), note, ticket=ticket, alone=alone, rows=len(rows)
                )
                return answer, arrays
            case Take(fit, epoch, era, wait):
                if wait:
                    return schedule.take(worker, incarnation, fit, epoch, era, timeout_s), ()
                return schedule.try_take(worker, incarnation, fit, epoch, era) or Done(), ()
            case Pull(fit, version):
                newest, values = store.pull(fit, version)
                return Values(newest, dtypes=dtypes_of(values), shards=len(values)), values
            case PullRows(fit):
                rows = store.pull_rows(fit, arrays_of(buffers, [NUMBER.name] * len(buffers)))
                return Values(store.version, dtypes=dtypes_of(rows), rows=len(rows)), rows
            case PullTables(fit):
                tables = store.pull_tables(fit)
                return Values(store.version, dtypes=dtypes_of(tables), rows=len(tables)), tables
            case PullOptimizer(with_tables):
                slots, state = store.optimizer_values(tables=with_tables)
                return Values(store.version, dtypes=dtypes_of(state), slots=slots), state
            case Declare():
                with self._restoring:
                    self._must_rebuild = False
                    store.declare(question, buffers)
                self._write_snapshot()  # from now on there is one of this `fit`
            case Attach(fit, variables):
                first_epoch, table_numbers = store.attach(fit, variables, self._me.settings.rendezvous_timeout_s)
                return Values(schedule.era, first_epoch, tables=table_numbers), ()
            case SetRate(rate):
                store.set_learning_rate(rate)
            case OpenEpoch(fit, epoch, steps):
                order = np.frombuffer(buffers[0], np.int64) if buffers else None
                schedule.open_epoch(fit, epoch, None if steps < 0 else steps, order)
            case Order(fit, epoch):
                return Values(0), [schedule.order(fit, epoch, timeout_s)]
            case NoBatch(ticket, ends):
                schedule.no_batch(ticket, ends=ends)
            case Report():
                schedule.report(worker, question, arrays_of(buffers, question.dtypes))
            case Collect(fit, epoch):
                merged, _, _ = schedule.collect(fit, epoch, timeout_s)
                return Values(0, schedule.global_step, dtypes_of(merged)), merged
            case Hold(on):
                if on:
                    schedule.hold(timeout_s)
                else:
                    schedule.go_on()
                return Values(0, schedule.global_step), ()
            case IsOver():
                return FitOver() if schedule.has_chief_left else Done(), ()
            case BeginSession(session):
                schedule.begin_session(worker, session)
            case EndFit(fit):
                schedule.end_fit(fit)
                store.tell_copy(question)
                self._write_snapshot()
        return Done(), ()

    def _wait_for_chief(self) -> None:
        """Where there is a copy, it may lead by now: the one to which the chief is linked is right."""
        if self._other is None:
            return
        return_s = self._me.settings.return_timeout_s or RETURN_S
        with self._changed:
            settled = self._changed.wait_for(lambda: CHIEF in self._links or CHIEF in self._gone, return_s)
        if not settled:
            raise lost(self._names[CHIEF], f"training; it did not come back within {return_s:g} s")


def _answer(link: Link, answer: Answer, arrays: Sequence[Array] = (), patience_s: float = SEND_S) -> None:
    link.send(
        _encode(answer), [np.ascontiguousarray(array) for array in arrays], deadline=time.monotonic() + patience_s
    )
