"""A worker's link to the chief: orders come, and answers go, until the chief has no more to do.

One thread reads what comes and answers questions whether this process is alive; the main thread, which backends like
best, does as told.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from phalanx.cluster.task_identity import TaskIdentity
from phalanx.coordinator.accepted_workers import PING_S
from phalanx.coordinator.coordinator_messages import Answer, Order, Ping, Pong, StopWorker
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError, RendezvousError
from phalanx.parameter_server.client.server_dialing import connect
from phalanx.parameter_server.server_protocol import peer_lost
from phalanx.transport.decoding import Decoder
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

Reply = tuple[Answer, list[bytes]]

_ORDERS = Decoder(Order)
_encode = msgspec.msgpack.Encoder().encode


class OrderHandler(Protocol):
    """What does as the chief tells."""

    @property
    def is_calling(self) -> bool:
        """Whether a function runs, whose result is not awaited any more once the chief has no more to do."""
        ...

    def begin(self) -> None:
        """A link begins, perhaps to another process of the chief: it sends again all that is needed."""
        ...

    def handle(self, order: Order, buffers: list[memoryview]) -> Reply | None:
        """Do as told; returns the answer, if one is wanted."""
        ...

    def check(self) -> None:
        """After each order. Raises: what ends this process."""
        ...


class ChiefSession:
    """Takes the chief's orders.

    Args:
        me: This task.
        purpose: What for this task connects to the chief.
        handler: Does as told.
        is_job_over: Whether the chief has gone for good, asked while it is not there.
    """

    def __init__(self, me: TaskIdentity, purpose: str, handler: OrderHandler, is_job_over: Callable[[], bool]) -> None:
        self._me = me
        self._purpose = purpose
        self._handler = handler
        self._is_job_over = is_job_over
        self._stopped = False

    def run(self) -> None:
        """Serve until the chief has no more to do.

        Raises:
            RendezvousError: the chief did not connect in time.
            PeerLostError: it was lost, or stopped, and did not return; so for a server.
            LinkTimeoutError: a server did not answer.
        """
        config, chief = self._me.config, self._me.tasks[0]
        deadline = time.monotonic() + config.rendezvous_timeout_s
        link: Link | None = None
        try:
            while not self._stopped:
                try:
                    link = connect(self._me, chief, self._purpose, deadline, self._check)
                except _JobOverError:
                    return
                except RendezvousError as error:
                    if link is None:
                        raise
                    raise peer_lost(str(chief), "scheduled functions; it did not return within the time set") from error
                self._serve(link)
                deadline = time.monotonic() + config.timeout_s  # for the chief to return
        except KeyboardInterrupt:
            if not self._stopped:  # otherwise it is our own, to end a function whose result is not awaited
                raise
        finally:
            if link is not None:
                link.close()

    def _serve(self, link: Link) -> None:
        """Serve one process of the chief, until it has no more to do or is gone."""
        self._handler.begin()
        # It asks every PING_S whether this worker is alive, unless its process is stopped; a large order takes longer.
        orders = _ReceivedOrders(link, self._stop, patience_s=self._me.config.timeout_s + 2 * PING_S)
        try:
            while (message := orders.next()) is not None:
                answer = self._handler.handle(*message)
                if answer is not None:
                    orders.send(*answer)
                self._handler.check()
        except _ChiefGoneError as error:
            self._handler.check()
            logger.warning("%s: %s Waiting for it to return.", self._me.task, error)
        finally:
            link.close()

    def _check(self) -> None:
        """While the chief is not there: has it gone for good?"""
        if self._is_job_over():
            raise _JobOverError

    def _stop(self) -> None:
        """In the reading thread: there is no more to do."""
        self._stopped = True
        if self._handler.is_calling:
            # Its result is not awaited any more. A real signal also ends sleeps and waits. The main thread is still in
            # `run` when it comes: it does not get past `_ReceivedOrders.next` before this returns.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class _JobOverError(Exception):
    """The chief had no more to do before this worker came."""


class _ChiefGoneError(Exception):
    """There is no link to the chief any more."""


_GONE = (LinkClosedError, LinkTimeoutError, FrameError, _ChiefGoneError)


class _ReceivedOrders:
    """The orders that come over a link, and the thread that reads it.

    Args:
        stop: Called in that thread when there is no more to do.
        patience_s: How long the chief may say nothing, and may take to read an answer.
    """

    def __init__(self, link: Link, stop: Callable[[], None], *, patience_s: float) -> None:
        self._link = link
        self._stop = stop
        self._patience_s = patience_s
        self._sending = threading.Lock()  # the reading thread sends `Pong`s, the main thread all other answers
        self._inbox: queue.SimpleQueue[tuple[Order, list[memoryview]] | Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="phalanx-coordinator", daemon=True).start()

    def next(self) -> tuple[Order, list[memoryview]] | None:
        """What to do next; waits for it. None if there is no more.

        Raises: _ChiefGoneError; what else the reading thread met.
        """
        message = self._inbox.get()  # the reading thread ends with one, when the chief is silent for too long
        if isinstance(message, _GONE):
            raise _ChiefGoneError(str(message)) from message
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, answer: Answer, buffers: Sequence[bytes] = ()) -> None:
        """Answer. Raises: _ChiefGoneError."""
        try:
            with self._sending:
                self._link.send(_encode(answer), buffers, deadline=time.monotonic() + self._patience_s)
        except _GONE as error:
            raise _ChiefGoneError(str(error)) from error

    def _read(self) -> None:
        try:
            while True:
                header, buffers = self._link.receive(deadline=time.monotonic() + self._patience_s)
                order = _ORDERS.decode(header)
                if isinstance(order, Ping):
                    self.send(Pong())
                elif isinstance(order, StopWorker):
                    self._stop()
                    self._inbox.put(None)
                    return
                else:
                    self._inbox.put((order, buffers))
        except Exception as error:  # for the thread that runs functions
            self._inbox.put(error)
