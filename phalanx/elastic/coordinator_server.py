"""Serves the elastic coordinator: links from the processes of the job, and a clock."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from phalanx.cluster.task_comparison import TaskDescription
from phalanx.elastic import membership_messages as messages
from phalanx.elastic.control_messages import (
    CONTROL,
    IMPOSSIBLE,
    LAUNCHER,
    ElasticJobStatus,
    HostStatus,
    MemberStatus,
    ScaleRequest,
)
from phalanx.elastic.elastic_coordinator import CoordinatorState, ElasticCoordinator, LossCause, ProcessLost
from phalanx.elastic.launcher_interface import ElasticJob
from phalanx.elastic.member_table import MembershipLimits
from phalanx.errors import ConfigurationError, LinkClosedError, LinkTimeoutError
from phalanx.monitoring.stragglers import StepTiming, StragglerDetector
from phalanx.transport.credentials import Credentials
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener

TICK_S = 0.1
SEND_S = 2.0
"""For a message of a few kilobytes. A process that does not read it in this time is stopped; its silence reveals
that."""

_decoder: msgspec.msgpack.Decoder[messages.ToCoordinator] = msgspec.msgpack.Decoder(messages.ToCoordinator)


class CoordinatorServer:
    """Serves a coordinator from a listening socket, in its own threads, until it is closed. Implements
    `MembershipControl` for the launcher and the listener's `Service` for processes.

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
        self._senders: dict[str, _Sender] = {}
        self._job = job_actions
        self._slots = limits.maximum
        self._stragglers = StragglerDetector(timeout_s=limits.timeout_s)
        self._hosts: list[HostStatus] = []
        self.coordinator = ElasticCoordinator(limits, time.monotonic(), job=job_actions, send=self._send)
        self._closed = threading.Event()
        self._listener = Listener(sockets, task=LAUNCHER, credentials=credentials, job=job)
        self._listener.register(messages.COORDINATOR, self)
        self._listener.register(CONTROL, _ControlService(self))
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

    # See `MembershipControl`.

    def lose(self, task: str) -> None:
        with self._lock:
            for incarnation in self.coordinator.table.of_task(task):
                self.coordinator.lose(ProcessLost(incarnation, LossCause.PROCESS_ENDED), time.monotonic())

    def withdraw(self, task: str) -> None:
        with self._lock:
            self.coordinator.withdraw(task, time.monotonic())

    def readmit(self, task: str) -> None:
        with self._lock:
            self.coordinator.table.withdrawn.discard(task)

    def limit(self, workers: int) -> None:
        with self._lock:
            self.coordinator.limit(workers, time.monotonic())

    def show_hosts(self, hosts: Sequence[HostStatus]) -> None:
        with self._lock:
            self._hosts = list(hosts)

    # See `transport.listener.Service`.

    def admit(self, hello: Hello) -> Welcome:
        try:
            description = msgspec.msgpack.decode(hello.details, type=TaskDescription)
        except msgspec.MsgspecError as error:
            return Welcome(
                refusal=messages.DISAGREEMENT, reason=f"{hello.task} runs another version of Phalanx ({error})."
            )
        with self._lock:
            if self.coordinator.failure:
                return Welcome(refusal=messages.FAILED, reason=f"The job has failed: {self.coordinator.failure}.")
            if reason := self.coordinator.table.disagreement(description):
                return Welcome(refusal=messages.DISAGREEMENT, reason=reason)
            response = self.coordinator.admit(description, time.monotonic())
        return Welcome(details=msgspec.msgpack.encode(response))

    def adopt(self, hello: Hello, link: Link) -> None:
        sender = _Sender(hello.task, link)
        sender.start()
        with self._lock:
            self._senders[hello.incarnation] = sender
        receive = partial(self._receive, hello.incarnation, link, sender)
        threading.Thread(target=receive, name=f"phalanx-elastic-from-{hello.task}", daemon=True).start()

    def control(self, request: ScaleRequest) -> ElasticJobStatus:
        """Fulfil a user's request; returns the state of the job.

        Raises: ConfigurationError if it cannot be fulfilled.
        """
        with self._lock:
            now = time.monotonic()
            if request.workers is not None:
                minimum = self.coordinator.table.limits.minimum
                if not minimum <= request.workers <= self._slots:
                    raise ConfigurationError(
                        f"{request.workers} workers are requested, but the job was started with --workers "
                        f"{minimum}:{self._slots}: it accepts {minimum} to {self._slots}."
                    )
                self.coordinator.resize(request.workers, now)
                self._job.resize(request.workers)
            return self._state(now)

    def _state(self, now: float) -> ElasticJobStatus:
        coordinator, table = self.coordinator, self.coordinator.table
        ranks = {incarnation: rank for rank, incarnation in enumerate(table.members)}
        states = [
            MemberStatus(
                rank=ranks.get(incarnation, -1),
                task=process.task,
                host=process.description.host,
                pid=process.description.pid,
                timing=process.timing,
                silent_s=now - process.last_message_at,
                step_seconds=self._stragglers.step_seconds(incarnation),
                is_slow=self._stragglers.is_slow(incarnation),
            )
            for incarnation, process in table.processes.items()
        ]
        is_regrouping = coordinator.state in (CoordinatorState.REGROUPING, CoordinatorState.SHORT_OF_MEMBERS)
        is_gathering = coordinator.state is CoordinatorState.GATHERING
        return ElasticJobStatus(
            generation=coordinator.generation,
            minimum=table.limits.minimum,
            maximum=table.limits.maximum,
            activity="gathering" if is_gathering else "regrouping" if is_regrouping else "",
            steps_per_s=table.processes[table.members[0]].timing.steps_per_s if table.members else 0.0,
            members=sorted(states, key=lambda state: (state.rank < 0, state.rank)),
            hosts=self._hosts,
        )

    # Threads.

    def _receive(self, incarnation: str, link: Link, sender: _Sender) -> None:
        for message in messages.receive(link, _decoder):
            with self._lock:
                now = time.monotonic()
                if isinstance(message, StepTiming):
                    self._stragglers.add(incarnation, message, now)
                self.coordinator.receive(incarnation, message, now)
        with self._lock:
            sender.finish()
            # A process whose link broke may have dialled again by now; then only its former link has ended.
            if self._senders.get(incarnation) is sender:
                del self._senders[incarnation]
                self.coordinator.lose(ProcessLost(incarnation, LossCause.LINK_CLOSED), time.monotonic())
        link.close()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:
                now, table = time.monotonic(), self.coordinator.table
                self.coordinator.tick(now)
                names = {i: f"{table.processes[i].task} (rank {rank})" for rank, i in enumerate(table.members)}
                for text in self._stragglers.detect(names, self.coordinator.generation, now):
                    self._job.log(text)

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
        while (message := self._messages.get()) is not None:
            with contextlib.suppress(LinkClosedError, LinkTimeoutError):  # the receiving thread notices
                messages.send(self._link, message, SEND_S)
        self._link.finish()


class _ControlService:
    """Answers requests of users. The `Welcome` holds the whole answer."""

    def __init__(self, server: CoordinatorServer):
        self._server = server

    def admit(self, hello: Hello) -> Welcome:
        try:
            state = self._server.control(msgspec.msgpack.decode(hello.details, type=ScaleRequest))
        except (ConfigurationError, msgspec.MsgspecError) as error:
            return Welcome(refusal=IMPOSSIBLE, reason=str(error))
        return Welcome(details=msgspec.msgpack.encode(state))

    def adopt(self, hello: Hello, link: Link) -> None:
        del hello
        link.close()
