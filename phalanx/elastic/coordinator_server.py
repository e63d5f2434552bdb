"""Serves the elastic coordinator: provides links to the processes of the job, and a clock."""

from __future__ import annotations

import queue
import socket
import threading
import time
from functools import partial

import msgspec

from phalanx.cluster import membership_messages as messages
from phalanx.cluster.admission_control import DISAGREEMENT, decode_newcomer
from phalanx.elastic.elastic_coordinator import ElasticCoordinator, LossCause
from phalanx.elastic.launcher_interface import LauncherActions
from phalanx.elastic.member_table import MembershipLimits
from phalanx.errors import ConfigurationError, LinkClosedError, LinkTimeoutError
from phalanx.transport.credentials import Credentials
from phalanx.transport.decoding import Decoder
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener

TICK_S = 0.1
SEND_S = 2.0
"""Time limit for a message of a few kilobytes. A process that does not read it in time is stopped, and is lost."""

LAST_MESSAGES_S = 2.0
"""Time limit for the last messages of an exited process. They have arrived unless the network to its host is slow."""

_decoder: Decoder[messages.ToCoordinator] = Decoder(messages.ToCoordinator)


class CoordinatorServer:
    """Serves a coordinator on listening sockets, in its own threads, until it is closed. Implements the listener's
    `Service` for processes. The methods for the launcher are thread-safe.

    Args:
        sockets: Listening sockets; the server closes them.
        limits: Bounds on the number of members.
        credentials: The secret of the job, which processes must prove that they have.
        job: Id of the job.
        job_actions: Executes the coordinator's decisions in the launcher. Called from threads of the server.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        limits: MembershipLimits,
        *,
        credentials: Credentials,
        job: str,
        job_actions: LauncherActions,
    ):
        # Protects everything below. Reentrant, since the coordinator sends while it decides. Never held while waiting.
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
        """Report that the process of this task failed."""
        with self._lock:
            for incarnation in self.coordinator.table.of_task(task):
                self.coordinator.lose(incarnation, LossCause.PROCESS_ENDED, time.monotonic())

    def has_left_early(self, task: str) -> bool:
        """Whether the process of this task, which exited with code 0, left in the middle of an entry of the others. May
        wait up to LAST_MESSAGES_S for its last messages."""
        with self._has_received:
            # Its last message, or the end of its link, removes it from the table.
            self._has_received.wait_for(lambda: not self.coordinator.table.of_task(task), LAST_MESSAGES_S)
            return self.coordinator.early_exits.has_left_early(task)

    def withdraw(self, task: str) -> None:
        """Make this task leave before one of the next training steps, because its host is withdrawn."""
        with self._lock:
            self.coordinator.withdraw(task, time.monotonic())

    def readmit(self, task: str) -> None:
        """Allow the next process of this task to take part again."""
        with self._lock:
            self.coordinator.table.withdrawn.discard(task)

    def limit_processes(self, workers: int) -> None:
        """Set the number of worker processes that will ever be started, so that the job does not wait for more."""
        with self._lock:
            self.coordinator.limit_processes(workers, time.monotonic())

    def scale(self, workers: int) -> None:
        """Set the number of workers that a user has requested.

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
            # Nothing can be sent to it before `adopt`, and it has not requested anything yet. If the job ends in
            # between, the coordinator answers its first message.
            response = self.coordinator.admit(description, time.monotonic())
            self._senders.pop(hello.incarnation, None)  # only the end of the new link is a loss now
        return Welcome(details=msgspec.msgpack.encode(response))

    def adopt(self, hello: Hello, link: Link) -> None:
        sender = _Sender(hello.task, link)
        sender.start()
        with self._lock:
            self._senders[hello.incarnation] = sender  # before the first message, which may need an answer
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
            # A process whose link broke may have reconnected; then only its old link has ended.
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
    """Thread that sends to one process, so that one that is stopped or reads a large result does not delay others."""

    def __init__(self, task: str, link: Link):
        super().__init__(name=f"phalanx-elastic-to-{task}", daemon=True)
        self._link = link
        self._messages: queue.SimpleQueue[messages.FromCoordinator | None] = queue.SimpleQueue()

    def send(self, message: messages.FromCoordinator) -> None:
        self._messages.put(message)

    def finish(self) -> None:
        """End the thread once everything has been sent."""
        self._messages.put(None)

    def run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                messages.send(self._link, message, SEND_S)
            self._link.finish()
        except LinkTimeoutError:
            self._link.close()  # a process that misses an order must not get later ones
        except LinkClosedError:
            pass  # the receiving thread reads what the process sent before
