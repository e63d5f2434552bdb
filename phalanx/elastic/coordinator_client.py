"""A process's link to the elastic coordinator: sends requests and two heartbeats per second, and receives orders."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from phalanx.cluster import membership_messages as messages
from phalanx.cluster.admission_control import DISAGREEMENT
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.environment_variables import ELASTIC_COORDINATOR
from phalanx.errors import (
    DisagreementError,
    EvictedError,
    HandshakeError,
    LinkClosedError,
    LinkTimeoutError,
    RendezvousError,
)
from phalanx.transport.address import Address
from phalanx.transport.decoding import Decoder, decode_message
from phalanx.transport.dial import ATTEMPT_TIMEOUT_S, HANDSHAKE_FAILURES_S, RefusedError, retry_delay_s
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

SEND_S = 5.0
HEARTBEAT_S = 0.5

Order = messages.FormGeneration | messages.EntryAlreadyFinished | messages.EntryStarted

_decoder: Decoder[messages.FromCoordinator] = Decoder(messages.FromCoordinator)


class CoordinatorClient:
    """See the module docstring. The constructor connects.

    Args:
        identity: Identity of this process.
        on_generation_ended: Receives the number of a generation that has ended. Called in a thread of the client.

    Attributes:
        response: The coordinator's answer to this process's arrival.
        link: The link to the coordinator.
        regroup_requested: The generation that this process, as the chief, is asked to leave; None if there is none.
        is_lost: Whether the coordinator is lost, and with it the right to train: it may have started other processes,
            which write the same checkpoints.

    Raises:
        RendezvousError: the coordinator can't be reached, or the job has failed.
        DisagreementError: this process differs from the others in something that must be equal.
        HandshakeError: the peer at the coordinator's address has another secret, or is something else.
    """

    def __init__(self, identity: TaskIdentity, on_generation_ended: Callable[[int], None]):
        self._identity = identity
        self._on_generation_ended = on_generation_ended
        self.regroup_requested: int | None = None
        self.is_lost = False
        self._generation = 0  # the last one ordered; it ends with the link
        self._orders: queue.SimpleQueue[Order | messages.Dismissed | None] = queue.SimpleQueue()  # None marks the end
        self._sending = threading.Lock()  # serializes the frames of several threads
        self._closed = threading.Event()  # set when this process leaves: the end of the link is then no loss
        self.link, self.response = self._connect()
        task = identity.description.task
        for name, body in (("orders", self._receive), ("life", self._send_heartbeats)):
            threading.Thread(target=body, name=f"phalanx-elastic-{name}-{task}", daemon=True).start()

    def send(self, message: messages.ToCoordinator) -> None:
        """Send a message to the coordinator.

        Raises: LinkClosedError or LinkTimeoutError if the coordinator is lost, and with it the job.
        """
        with self._sending:
            messages.send(self.link, message, SEND_S)

    def request(self, message: messages.ToCoordinator) -> Order:
        """Send a message and wait for the next order. The coordinator enforces the time limit of the wait.

        Raises:
            EvictedError: this process was evicted.
            RendezvousError: the job has failed, or the launcher is lost.
            SystemExit: this process is no longer needed.
        """
        try:
            self.send(message)
        except (LinkClosedError, LinkTimeoutError) as error:
            raise self._launcher_lost() from error
        return self.next_order()

    def next_order(self) -> Order:
        """Wait for the next order; see `request`.

        The wait ends with the link at the latest. Silence alone is no reason to give up, since a suspended launcher
        (Ctrl-Z) may continue. A dead host is detected within 25 s.
        """
        order = self._orders.get()
        if order is None:
            self._orders.put(None)  # for the next call
            raise self._launcher_lost()
        if isinstance(order, messages.Dismissed):
            _raise_dismissed(order)
        return order

    def close(self, *, last: messages.ToCoordinator | None) -> None:
        """Stop sending, after a last message if there is one. The link stays open for data in transit."""
        self._closed.set()
        with contextlib.suppress(LinkClosedError, LinkTimeoutError):
            if last is not None:
                self.send(last)
            self.link.finish()

    def _connect(self) -> tuple[Link, messages.JoinResponse]:
        config, description = self._identity.config, self._identity.description
        assert config.elastic_coordinator is not None
        address = Address.parse(config.elastic_coordinator, where=ELASTIC_COORDINATOR)
        details = msgspec.msgpack.encode(description)
        started_at = time.monotonic()
        failing_since: float | None = None  # since then, a peer other than the launcher has answered each attempt
        while True:
            now = time.monotonic()
            try:
                link, welcome = self._identity.dial_address(
                    address, messages.LAUNCHER, messages.COORDINATOR, details, deadline=now + ATTEMPT_TIMEOUT_S
                )
                return link, decode_message(welcome.details, messages.JoinResponse)
            except RefusedError as error:
                kind = DisagreementError if error.welcome.refusal == DISAGREEMENT else RendezvousError
                raise kind(error.welcome.reason) from error
            except HandshakeError:
                failing_since = failing_since or now
                if now - failing_since > HANDSHAKE_FAILURES_S:
                    raise
            except (LinkClosedError, LinkTimeoutError) as error:
                failing_since = None
                if now - started_at > config.rendezvous_timeout_s:
                    raise RendezvousError(
                        f"{description.task} cannot reach the launcher at {address}: {error}"
                    ) from error
            time.sleep(retry_delay_s(time.monotonic() - started_at))

    def _receive(self) -> None:
        try:
            self._receive_orders()
        finally:  # in any case, wake a call that waits for an order
            self._orders.put(None)
            if not self._closed.is_set():
                self.is_lost = True
                self._on_generation_ended(self._generation)

    def _receive_orders(self) -> None:
        for order in messages.receive(self.link, _decoder):
            # The first two go to a process that trains and therefore waits for no order.
            if isinstance(order, messages.RegroupRequest):
                self.regroup_requested = order.generation
            elif isinstance(order, messages.GenerationEnded):
                self._on_generation_ended(order.generation)
            elif not isinstance(order, messages.StartOrder):  # used only in jobs of fixed size
                if isinstance(order, messages.FormGeneration):
                    self._generation = order.generation
                self._orders.put(order)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            try:
                self.send(messages.Heartbeat())
            except LinkTimeoutError:
                continue  # the launcher has been suspended for hours: the kernels' buffers are full
            except LinkClosedError:
                return  # the receiving thread handles it

    def _launcher_lost(self) -> RendezvousError:
        return RendezvousError(
            f"{self._identity.description.task} lost the launcher, which coordinates the members of the job. It was "
            f"killed, or the network between them is down."
        )


def _raise_dismissed(order: messages.Dismissed) -> NoReturn:
    if order.cause == "evicted":
        raise EvictedError(f"This worker was evicted from the job: {order.reason}.")
    if order.cause == "failed":
        raise RendezvousError(f"The job has failed: {order.reason}.")
    # It arrived too late, or there are too many workers. That is no failure.
    logger.info("this worker is no longer needed: %s", order.reason)
    raise SystemExit(0)
