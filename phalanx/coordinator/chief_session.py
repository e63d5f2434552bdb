"""A worker's link to the chief: orders arrive and replies are sent, until the chief has no more orders.

One thread reads messages and answers pings; the main thread, which suits backends best, executes orders.
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
from phalanx.coordinator.accepted_workers import PING_INTERVAL_S
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
    """Executes the chief's orders."""

    @property
    def is_calling(self) -> bool:
        """Whether a function is running, whose result is no longer awaited once the chief stops the worker."""
        ...

    def begin(self) -> None:
        """Begin a link, perhaps to another process of the chief: it sends everything again."""
        ...

    def handle(self, order: Order, buffers: list[memoryview]) -> Reply | None:
        """Execute an order. Returns the reply, if one is expected."""
        ...

    def check(self) -> None:
        """Called after each order. Raises: the error that ends this process."""
        ...


class ChiefSession:
    """Receives the chief's orders.

    Args:
        me: This task.
        purpose: Purpose for which this task connects to the chief.
        handler: Executes the orders.
        is_job_over: Returns whether the chief has left for good; called while it is not connected.
    """

    def __init__(self, me: TaskIdentity, purpose: str, handler: OrderHandler, is_job_over: Callable[[], bool]) -> None:
        self._me = me
        self._purpose = purpose
        self._handler = handler
        self._is_job_over = is_job_over
        self._stopped = False

    def run(self) -> None:
        """Serve until the chief has no more orders.

        Raises:
            RendezvousError: the chief did not connect in time.
            PeerLostError: it was lost, or stopped, and did not return; likewise for a server.
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
            if not self._stopped:  # otherwise sent by `_stop`, to end a function whose result is not awaited
                raise
        finally:
            if link is not None:
                link.close()

    def _serve(self, link: Link) -> None:
        """Serve one process of the chief, until it has no more orders or is lost."""
        self._handler.begin()
        # It pings every PING_INTERVAL_S, unless its process is stopped; a large order takes longer.
        orders = _ReceivedOrders(link, self._stop, timeout_s=self._me.config.timeout_s + 2 * PING_INTERVAL_S)
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
        """Raise _JobOverError if the chief, which is not connected, has left for good."""
        if self._is_job_over():
            raise _JobOverError

    def _stop(self) -> None:
        """Stop, in the reading thread: there are no more orders."""
        self._stopped = True
        if self._handler.is_calling:
            # Its result is no longer awaited. A real signal also ends sleeps and waits. The main thread is still in
            # `run` when it arrives: it does not get past `_ReceivedOrders.next` before this returns.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class _JobOverError(Exception):
    """The chief had no more orders before this worker connected."""


class _ChiefGoneError(Exception):
    """There is no longer a link to the chief."""


_LINK_ERRORS = (LinkClosedError, LinkTimeoutError, FrameError, _ChiefGoneError)


class _ReceivedOrders:
    """The orders received over a link, and the thread that reads it.

    Args:
        stop: Called in that thread when there are no more orders.
        timeout_s: Seconds that the chief may be silent, and may take to read a reply.
    """

    def __init__(self, link: Link, stop: Callable[[], None], *, timeout_s: float) -> None:
        self._link = link
        self._stop = stop
        self._timeout_s = timeout_s
        self._sending = threading.Lock()  # the reading thread sends `Pong`s, the main thread all other answers
        self._inbox: queue.SimpleQueue[tuple[Order, list[memoryview]] | Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="phalanx-coordinator", daemon=True).start()

    def next(self) -> tuple[Order, list[memoryview]] | None:
        """The next order; waits for it. None if there are no more.

        Raises: _ChiefGoneError; any other error of the reading thread.
        """
        message = self._inbox.get()  # if the chief is silent for too long, the reading thread puts an error here
        if isinstance(message, _LINK_ERRORS):
            raise _ChiefGoneError(str(message)) from message
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, answer: Answer, buffers: Sequence[bytes] = ()) -> None:
        """Send a reply. Raises: _ChiefGoneError."""
        try:
            with self._sending:
                self._link.send(_encode(answer), buffers, deadline=time.monotonic() + self._timeout_s)
        except _LINK_ERRORS as error:
            raise _ChiefGoneError(str(error)) from error

    def _read(self) -> None:
        try:
            while True:
                header, buffers = self._link.receive(deadline=time.monotonic() + self._timeout_s)
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
