"""The coordinator's end of its links: accepts workers, sends their orders, and detects lost workers.

Each worker has a thread that sends to it and one that receives from it. Sockets are read and written without the lock.
Everything sent to a worker passes through its outbox, in the order of decisions made with the lock held: a message may
refer to the content of an earlier one (`StoreObject`, `CreateObject`, `Define`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from phalanx.cluster.admission_control import admit_worker, link_name
from phalanx.cluster.peer_identification import PROBE, ProbeService
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.coordinator.coordinator_messages import (
    Answer,
    CreateObject,
    DeclareVariables,
    DropObject,
    Ping,
    StopWorker,
)
from phalanx.coordinator.worker_connection import DeferredMessage, Message, WorkerConnection
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError
from phalanx.runtime import progress
from phalanx.transport.decoding import Decoder
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

if TYPE_CHECKING:
    from phalanx.coordinator.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

WORKER_PURPOSE = "coordinator"
"""Purpose of links from workers that also run the chief's program."""
WORKER_SERVER_PURPOSE = "worker server"
"""Purpose of links from workers that run no program of their own."""
METHOD = "method"
"""Role of the message by which workers without a program call the running method."""
PING_INTERVAL_S = 5.0
"""Seconds between two pings. A worker's death is noticed without them, but not a stopped process."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that `close` waits for busy workers."""

_ANSWERS = Decoder(Answer)
_encode = msgspec.msgpack.Encoder().encode


class AcceptedWorkers:
    """Owns the listening port, the links to the workers and their threads.

    Args:
        me: This task.
        changed: Condition that protects all state, here and in the dispatcher; notified when any of it changes.
        silent: Names of workers that were lost because they did not answer, and have not returned; kept up to date.

    Attributes:
        names: Names of the workers, by rank.
        greeting: Packs the first message to a worker that runs no program of its own.
    """

    def __init__(
        self, me: TaskIdentity, changed: threading.Condition, dispatcher: Dispatcher, silent: set[str]
    ) -> None:
        self._me = me
        self._changed = changed
        self._dispatcher = dispatcher
        self._silent = silent
        self.names = {rank: str(task) for rank, task in enumerate(me.tasks) if rank != me.rank}
        self.greeting: Callable[[], Message] | None = None
        self._workers: dict[int, WorkerConnection] = {}
        # Also sent to workers that join later.
        self._broadcasts: list[tuple[DeclareVariables | CreateObject, Sequence[bytes]]] = []
        # Additional messages for workers without a program, by role.
        self._worker_server_messages: dict[str, DeferredMessage] = {}
        self._link_numbers = itertools.count()
        self._closing = False
        self._listener = me.open_listener()
        self._listener.register(PROBE, ProbeService(me))

    def start(self) -> None:
        """Start listening."""
        self._listener.start()

    def accept(self, purpose: str) -> None:
        """Accept workers that connect for this purpose."""
        self._listener.register(purpose, self)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def has_worker_servers(self) -> bool:
        """Whether a worker is connected that runs no program of its own."""
        with self._changed:
            return any(not worker.has_program for worker in self._workers.values())

    def broadcast(self, order: DeclareVariables | CreateObject, buffers: Sequence[bytes] = ()) -> None:
        """Send a message to all workers, and to those that join later (of `DeclareVariables`, only the last)."""
        with self._changed:
            if isinstance(order, DeclareVariables):
                self._broadcasts = [sent for sent in self._broadcasts if not isinstance(sent[0], DeclareVariables)]
            self._broadcasts.append((order, buffers))
            for worker in self._workers.values():
                worker.outbox.append((order, buffers))
            self._changed.notify_all()

    def drop(self, number: int) -> None:
        """Drop the per-worker value, or the large array, of this number on the workers."""
        with self._changed:
            self._broadcasts = [
                (order, buffers)
                for order, buffers in self._broadcasts
                if isinstance(order, DeclareVariables) or order.number != number
            ]
            for worker in self._workers.values():
                worker.stored.discard(number)
                # Behind the calls that use it, which are already in the outbox.
                worker.outbox.append((DropObject(number), ()))
            self._changed.notify_all()

    def send_to_worker_servers(self, role: str, pack: Callable[[], Message]) -> None:
        """Send a message to all workers without a program, including those that join later. It replaces the previous
        message of its role, and is packed once a worker needs it.

        Raises: the error of packing it, if a connected worker needs it.
        """
        message = DeferredMessage(pack)
        if self.has_worker_servers:
            message.packed()
        with self._changed:
            self._worker_server_messages[role] = message
            for worker in self._workers.values():
                if not worker.has_program:
                    worker.outbox.append(message)
            self._changed.notify_all()

    def withdraw(self, role: str) -> None:
        """Do not send the message of this role to workers that join later."""
        with self._changed:
            self._worker_server_messages.pop(role, None)

    def lose(self, worker: WorkerConnection, why: str, error: Exception | None = None) -> None:
        """Close the link to a worker, which does no more work; `error` is what its link raised."""
        worker.link.close()
        with self._changed:
            if self._workers.get(worker.number) is not worker:
                return  # it has reconnected since
            del self._workers[worker.number]
            if isinstance(error, LinkTimeoutError):
                self._silent.add(worker.name)
            if not self._closing:
                # A launcher reports itself which processes have ended, and why; after Ctrl-C no report is needed.
                is_known = isinstance(error, LinkClosedError) and progress.has_launcher()
                level = logging.INFO if is_known else logging.WARNING
                logger.log(level, "Lost %s: %s Its function runs on another worker.", worker.name, why)
            self._dispatcher.worker_lost(worker)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop all workers and close the port. Safe to call twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            for worker in self._workers.values():
                worker.outbox.append((StopWorker(), ()))
            self._changed.notify_all()
            # The workers close the links. If this end did, a message that they are sending could cost them this one.
            self._changed.wait_for(lambda: not self._workers, timeout=CLOSE_TIMEOUT_S)
            links = [worker.link for worker in self._workers.values()]
        for link in links:
            link.close()
        self._listener.close()

    # The listener's service.

    def admit(self, hello: Hello) -> Welcome:
        def link_of(number: int) -> tuple[str, Link] | None:
            with self._changed:
                present = self._workers.get(number)
            return None if present is None else (present.incarnation, present.link)

        return admit_worker(self._me, hello, self.names, link_of)

    def adopt(self, hello: Hello, link: Link) -> None:
        number = self._me.rank_of(hello.task)
        assert number is not None, "checked when it was admitted"
        with self._changed:
            incarnation = link_name(hello.incarnation, next(self._link_numbers))
            has_program = hello.purpose == WORKER_PURPOSE
            outbox = deque(self._broadcasts if has_program else self._all_broadcasts())
            worker = WorkerConnection(number, hello.task, incarnation, link, has_program, outbox)
            former = self._workers.get(number)
            if self._closing:
                worker.outbox.append((StopWorker(), ()))
            self._workers[number] = worker  # the threads of a previous connection see that they are no longer in use
            self._silent.discard(hello.task)
            self._dispatcher.worker_joined(worker)
            self._changed.notify_all()
        if former is not None:
            former.link.close()
        for body in (self._send_to, self._receive_from):
            threading.Thread(target=body, args=(worker,), name=f"phalanx-{hello.task}", daemon=True).start()

    def _all_broadcasts(self) -> Iterator[Message | DeferredMessage]:
        """The messages for a worker without a program: definitions, those that refer to them, the running method."""
        if self.greeting is not None:
            yield DeferredMessage(self.greeting)
        yield from (message for role, message in self._worker_server_messages.items() if role != METHOD)
        yield from self._broadcasts
        if METHOD in self._worker_server_messages:
            yield self._worker_server_messages[METHOD]

    # The threads of one worker.

    def _send_to(self, worker: WorkerConnection) -> None:
        try:
            while (message := self._next_message(worker)) is not None:
                try:
                    order, buffers = message.packed() if isinstance(message, DeferredMessage) else message
                except Exception as error:  # whatever cannot be packed
                    self._dispatcher.fail(error)
                    continue  # the worker stays: it can still run functions that do not need this object
                worker.link.send(
                    _encode(order), buffers, deadline=time.monotonic() + self._me.config.timeout_s + PING_INTERVAL_S
                )
                worker.last_sent_at = time.monotonic()
                if isinstance(order, StopWorker):
                    worker.link.finish()  # half: the other thread reads until the worker closes its end
                    return
        except (LinkClosedError, LinkTimeoutError, FrameError) as error:
            self.lose(worker, str(error), error)

    def _next_message(self, worker: WorkerConnection) -> Message | DeferredMessage | None:
        """Wait for the next message to this worker; None once it is lost."""
        with self._changed:
            while self._workers.get(worker.number) is worker:
                if worker.outbox:
                    return worker.outbox.popleft()
                if self._dispatcher.assign_next(worker):
                    continue
                if time.monotonic() - worker.last_sent_at > PING_INTERVAL_S:
                    return Ping(), ()
                self._changed.wait(PING_INTERVAL_S)
            return None

    def _receive_from(self, worker: WorkerConnection) -> None:
        limit_s = self._me.config.timeout_s + PING_INTERVAL_S
        try:
            while True:
                header, buffers = worker.link.receive(deadline=time.monotonic() + limit_s)
                self._dispatcher.handle_answer(worker, _ANSWERS.decode(header), buffers)
        except (LinkClosedError, LinkTimeoutError, FrameError) as error:
            self.lose(worker, str(error), error)
