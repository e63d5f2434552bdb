"""A parameter server: a port, a thread for each worker, a store, and on the first server the schedule.

It serves until the workers have said that they have no more to do. A worker that dies is left out, and may come back
as another process of the same task; what its former self still sends is refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.cluster.admission import DISAGREEMENT, DUPLICATE, PROBE, Probe
from phalanx.cluster.agreement import Statement, describe_disagreement
from phalanx.cluster.roll_call import Identity
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError, PhalanxError, RendezvousError
from phalanx.parameter_server.messages import (
    Answer,
    Attach,
    Bye,
    Collect,
    Declare,
    Done,
    EndFit,
    NoBatch,
    OpenEpoch,
    Order,
    Pull,
    PullOptimizer,
    PullRows,
    PullTables,
    Push,
    Question,
    Refusal,
    Report,
    SetRate,
    Take,
    Values,
    arrays_of,
    dtypes_of,
)
from phalanx.parameter_server.rows import NUMBER
from phalanx.parameter_server.schedule import CHIEF, POLL_S, Schedule, Worker, lost
from phalanx.parameter_server.store import Store
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener, open_sockets

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

PURPOSE = "parameter-server"
IDLE_S = 3600.0
"""How long a link may say nothing: a worker may compile, or its program do something else. Its death is noticed."""
SEND_S = 60.0
"""How long a worker may take to read an answer. One that is stopped holds up its own thread only."""
RETURN_S = 60.0
"""How long the chief may be away before the job counts as lost: a launcher restarts it in less."""

_QUESTIONS = msgspec.msgpack.Decoder(Question)
_encode = msgspec.msgpack.Encoder().encode


class ParameterServer:
    """Serves the workers of one cluster. `run` returns when the job is over.

    Args:
        me: this task, with all that the workers must agree on.
    """

    def __init__(self, me: Identity):
        self._me = me
        self._names = tuple(str(task) for task in me.tasks)
        servers = [task for task in me.spec.tasks if task.type == me.task.type]
        self._schedule = Schedule(self._names, start_s=me.settings.rendezvous_timeout_s)
        self._is_head = servers[0] == me.task
        self._store = Store(servers.index(me.task), self._schedule, self._names, is_head=self._is_head)
        self._changed = threading.Condition()
        self._links: dict[Worker, tuple[str, Link]] = {}
        self._gone: set[Worker] = set()  # those that said goodbye
        self._lost: dict[Worker, float] = {}  # those that did not, and since when
        self._closing = False

    def run(self) -> None:
        """Serve until all workers have said goodbye.

        Raises:
            ConfigurationError: the port is taken.
            RendezvousError: the chief did not come in time.
            PeerLostError: the chief was lost and did not come back.
        """
        settings = self._me.settings
        sockets = open_sockets(self._me.address, secret=settings.secret, listen_fd=settings.listen_fd)
        listener = Listener(
            sockets, task=str(self._me.task), secret=settings.secret, job=settings.job_id, tls=self._me.tls
        )
        listener.register(PURPOSE, self)
        listener.register(PROBE, Probe(self._me))
        with listener:
            try:
                self._wait_until_over(time.monotonic() + settings.rendezvous_timeout_s)
            finally:
                with self._changed:
                    self._closing = True
                    links = [link for _, link in self._links.values()]
                for link in links:
                    link.close()

    def _wait_until_over(self, first_contact_until: float) -> None:
        with self._changed:
            while not self._is_over(first_contact_until):
                now = time.monotonic()
                came = self._links.keys() | self._gone | self._lost.keys()
                if CHIEF not in came and now > first_contact_until:
                    raise RendezvousError(
                        f"{self._names[CHIEF]} did not come to {self._me.task} within "
                        f"{self._me.settings.rendezvous_timeout_s:g} s. Is it started, with the same cluster?"
                    )
                since = self._lost.get(CHIEF)
                if since is not None and now - since > RETURN_S and not self._links:
                    raise lost(self._names[CHIEF], f"training; it did not come back within {RETURN_S:g} s")
                self._changed.wait(POLL_S)

    def _is_over(self, first_contact_until: float) -> bool:
        """The chief has no more to do, nobody else is still here, but for those that were left out, and nobody is still
        to come."""
        if CHIEF not in self._gone:
            return False
        came = self._links.keys() | self._gone | self._lost.keys()
        if len(came) < len(self._names) and time.monotonic() < first_contact_until:
            return False
        return all(self._schedule.is_evicted(incarnation) for incarnation, _ in self._links.values())

    # The listener's service.

    def admit(self, hello: Hello) -> Welcome:
        try:
            newcomer = msgspec.msgpack.decode(hello.details, type=Statement)
        except msgspec.MsgspecError as error:
            return Welcome(
                refusal=DISAGREEMENT, reason=f"{hello.task} and {self._me.task} run different versions ({error})."
            )
        if disagreement := describe_disagreement(self._me.statement, newcomer):
            return Welcome(refusal=DISAGREEMENT, reason=disagreement)
        worker = self._me.rank_of(newcomer.task)
        if worker is None:
            return Welcome(refusal=DISAGREEMENT, reason=f"{newcomer.task} is no worker of this cluster.")
        present = self._links.get(worker)
        if present is not None and not present[1].peer_closed():
            return Welcome(
                refusal=DUPLICATE,
                reason=f"{newcomer.task} is here already. This process, pid {newcomer.pid} on {newcomer.host}, has the "
                f"same task: give it another task.index in TF_CONFIG, or end the other one.",
            )
        return Welcome(details=msgspec.msgpack.encode(self._me.statement))

    def adopt(self, hello: Hello, link: Link) -> None:
        worker = self._me.rank_of(hello.task)
        assert worker is not None, "checked when it was admitted"
        with self._changed:
            self._links[worker] = (hello.incarnation, link)
            self._gone.discard(worker)
            self._lost.pop(worker, None)
            self._changed.notify_all()
        self._schedule.attach(worker, hello.incarnation)
        threading.Thread(
            target=self._serve, args=(worker, hello.incarnation, link), name=f"phalanx-{hello.task}", daemon=True
        ).start()

    # One worker.

    def _serve(self, worker: Worker, incarnation: str, link: Link) -> None:
        self._store.notice()  # not in the listener's thread: the store may be busy
        try:
            while True:
                header, buffers = link.receive(deadline=time.monotonic() + IDLE_S)
                question = _QUESTIONS.decode(header)
                if isinstance(question, Bye):
                    with self._changed:
                        self._gone.add(worker)
                    if worker == CHIEF:
                        self._schedule.chief_left()
                    _answer(link, Done())
                    return
                try:
                    if self._schedule.is_evicted(incarnation):
                        raise PhalanxError(
                            f"{self._names[worker]} made no progress for too long and was left out; the others went "
                            f"on. Start it again to take part."
                        )
                    answer, arrays = self._handle(worker, incarnation, question, buffers)
                except PhalanxError as error:
                    answer, arrays = Refusal(type(error).__name__, str(error)), []
                except Exception as error:
                    logger.exception("%s cannot do what %s asked", self._me.task, self._names[worker])
                    answer, arrays = Refusal("PhalanxError", f"{self._me.task} failed: {error!r}"), []
                _answer(link, answer, arrays, max(SEND_S, self._me.settings.timeout_s))
        except (LinkClosedError, LinkTimeoutError) as error:
            if not self._closing:
                logger.warning("%s: %s", self._me.task, error)
        except (FrameError, msgspec.MsgspecError) as error:
            logger.warning("%s hangs up on %s: %s", self._me.task, self._names[worker], error)
        finally:
            link.close()
            self._forget(worker, incarnation, link)

    def _forget(self, worker: Worker, incarnation: str, link: Link) -> None:
        with self._changed:
            if self._links.get(worker, ("", None))[1] is not link:
                return  # it has come back since
            del self._links[worker]
            if worker not in self._gone:
                self._lost[worker] = time.monotonic()
            self._changed.notify_all()
        self._schedule.detach(worker, incarnation)
        self._store.notice()

    def _handle(
        self, worker: Worker, incarnation: str, question: Question, buffers: Sequence[memoryview]
    ) -> tuple[Answer, Sequence[Array]]:
        store, schedule = self._store, self._schedule
        timeout_s = self._me.settings.timeout_s
        match question:
            case Push():
                version, values, rows, extras, note = store.push(question, buffers)
                ticket = None
                if self._is_head and question.gradients:
                    now = question.ticket
                    ticket = schedule.try_take(worker, incarnation, now.fit, now.epoch, now.era)
                arrays = [*values, *rows, *extras]
                step = schedule.global_step
                dtypes, shards = dtypes_of(arrays), len(values)
                return Values(version, step, dtypes, shards, note, ticket=ticket, rows=len(rows)), arrays
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
                store.declare(question, buffers)
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
            case EndFit(fit):
                schedule.end_fit(fit)
        return Done(), ()


def _answer(link: Link, answer: Answer, arrays: Sequence[Array] = (), patience_s: float = SEND_S) -> None:
    link.send(
        _encode(answer), [np.ascontiguousarray(array) for array in arrays], deadline=time.monotonic() + patience_s
    )
