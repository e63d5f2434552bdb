"""Serves the elastic coordinator: links from the processes of the job, and a clock."""

from __future__ import annotations

import queue
import socket
import threading
import time
from functools import partial

import msgspec

from phalanx.cluster import membership_messages as messages
from phalanx.cluster.admission import DISAGREEMENT, decode_newcomer
from phalanx.elastic.elastic_coordinator import ElasticCoordinator, LossCause
from phalanx.elastic.launcher_interface import ElasticJob
from phalanx.elastic.member_table import MembershipLimits
from phalanx.errors import ConfigurationError, LinkClosedError, LinkTimeoutError
from phalanx.transport.credentials import Credentials
from phalanx.transport.decoding import Decoder
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener

TICK_S = 0.1
SEND_S = 2.0
"""For a message of a few kilobytes. A process that does not read it in this time is stopped, and is lost."""

LAST_MESSAGES_S = 2.0
"""For what an exited process sent last. It has arrived already, unless the network to its host is slow."""

_decoder: Decoder[messages.ToCoordinator] = Decoder(messages.ToCoordinator)


class CoordinatorServer:
    """Serves a coordinator from a listening socket, in its own threads, until it is closed. Implements
    the listener's `Service` for processes; the methods for the launcher may be called from any thread.

    Args:
        sockets: listening sockets; the server closes them.
        limits: how many members there may be.
        credentials: the secret of the job, which processes must prove to know.
        job: its id.
        job_actions: carries out what concerns the launcher. Called from threads of the server.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        limits: MembershipLimits,
        *,
        credentials: Credentials,
        job: str,
        job_actions: ElasticJob,
    ):
        # Protects everything below. Reentrant: the coordinator sends while it decides. Nothing waits while holding it.
        self._lock = threading.RLock()
        self._has_received = threading.Condition(self._lock)
        self._senders: dict[str, _Sender] = {}
        self._job = job_actions
        self._slots = limits.maximum
        self.coordinator = ElasticCoordinator(limits, time.monotonic(), job=job_actions, send=self._send)
        self._closed = threading.Event()
        self._listener = Listener(sockets, task=messages.LAUNCHER, credentials=credentials, job=job)
        self._listener.register(messages.COORDINATOR, self)
        self._listener.start()
        self._clock = threading.Thread(target=self._tick, name="phalanx-elastic-clock", daemon=True)
        self._clock.start()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self._clock.join()
        with self._lock:
            senders = list(self._senders.values())
            self._senders.clear()
        for sender in senders:
            sender.finish()
        deadline = time.monotonic() + SEND_S
        for sender in senders:
            sender.join(max(0.0, deadline - time.monotonic()))

    # For the launcher.

    def lose(self, task: str) -> None:
        """The process of this task has ended, and not successfully."""
        with self._lock:
            for incarnation in self.coordinator.table.of_task(task):
                self.coordinator.lose(incarnation, LossCause.PROCESS_ENDED, time.monotonic())

    def has_left_early(self, task: str) -> bool:
        """Whether the process of this task, which has exited with code 0, left in the middle of an entry of the others.
        May wait a moment for what it sent last."""
        with self._has_received:
            # Its last message, or the end of its link, removes it from the table.
            self._has_received.wait_for(lambda: not self.coordinator.table.of_task(task), LAST_MESSAGES_S)
            return self.coordinator.early_exits.has_left_early(task)

    def withdraw(self, task: str) -> None:
        """This task is to leave before a next training step, because its host is withdrawn."""
        with self._lock:
            self.coordinator.withdraw(task, time.monotonic())

    def readmit(self, task: str) -> None:
        """The next process of this task may take part again."""
        with self._lock:
            self.coordinator.table.withdrawn.discard(task)

    def limit_processes(self, workers: int) -> None:
        """There will never be more worker processes than this: the job need not wait for others."""
        with self._lock:
            self.coordinator.limit_processes(workers, time.monotonic())

    def scale(self, workers: int) -> None:
        """A user has requested this number of workers.

        Raises: ConfigurationError if it is out of bounds.
        """
        with self._lock:
            minimum = self.coordinator.table.limits.minimum
            if not minimum <= workers <= self._slots:
                raise ConfigurationError(
                    f"{workers} workers are requested, but the job was started with --workers "
                    f"{minimum}:{self._slots}: it accepts {minimum} to {self._slots}."
                )
            self.coordinator.resize(workers, time.monotonic())
            self._job.resize(workers)

    # See `transport.listener.Service`.

    def admit(self, hello: Hello) -> Welcome:
        description = decode_newcomer(hello, messages.LAUNCHER)
        if isinstance(description, Welcome):
            return description
        with self._lock:
            if self.coordinator.failure:
                return Welcome(refusal=messages.FAILED, reason=f"The job has failed: {self.coordinator.failure}.")
            if reason := self.coordinator.table.disagreement(description):
                return Welcome(refusal=DISAGREEMENT, reason=reason)
            # Nothing can be sent to it before `adopt`, and it has asked for nothing yet. If the job ends in between,
            # the coordinator answers its first message.
            response = self.coordinator.admit(description, time.monotonic())
            self._senders.pop(hello.incarnation, None)  # from now on, only the end of the new link is a loss
        return Welcome(details=msgspec.msgpack.encode(response))

    def adopt(self, hello: Hello, link: Link) -> None:
        sender = _Sender(hello.task, link)
        sender.start()
        with self._lock:
            self._senders[hello.incarnation] = sender  # before the first message is received, which may be answered
        receive = partial(self._receive, hello.incarnation, link, sender)
        threading.Thread(target=receive, name=f"phalanx-elastic-from-{hello.task}", daemon=True).start()

    # Threads.

    def _receive(self, incarnation: str, link: Link, sender: _Sender) -> None:
        for message in messages.receive(link, _decoder):
            with self._lock:
                self.coordinator.receive(incarnation, message, time.monotonic())
                self._has_received.notify_all()
        with self._lock:
            sender.finish()
            # A process whose link broke may have dialled again by now; then only its former link has ended.
            if self._senders.get(incarnation) is sender:
                del self._senders[incarnation]
                self.coordinator.lose(incarnation, LossCause.LINK_CLOSED, time.monotonic())
            self._has_received.notify_all()
        link.close()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:
                self.coordinator.tick(time.monotonic())

    def _send(self, incarnation: str, message: messages.FromCoordinator) -> None:
        if sender := self._senders.get(incarnation):
            sender.send(message)


class _Sender(threading.Thread):
    """Sends to one process, so that a process that is stopped or reads a large result does not delay the others."""

    def __init__(self, task: str, link: Link):
        super().__init__(name=f"phalanx-elastic-to-{task}", daemon=True)
        self._link = link
        self._messages: queue.SimpleQueue[messages.FromCoordinator | None] = queue.SimpleQueue()

    def send(self, message: messages.FromCoordinator) -> None:
        self._messages.put(message)

    def finish(self) -> None:
        """End the thread after everything has been sent."""
        self._messages.put(None)

    def run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                messages.send(self._link, message, SEND_S)
            self._link.finish()
        except LinkTimeoutError:
            self._link.close()  # to one that misses an order, no later one may be sent
        except LinkClosedError:
            pass  # the receiving thread reads what the process has sent before
