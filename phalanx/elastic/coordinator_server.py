"""The keeper's port: links from the processes of the job, and a clock, before the one `ElasticCoordinator`."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from phalanx.cluster.compatibility import TaskDescription
from phalanx.elastic.elastic_coordinator import ElasticCoordinator, MembershipLimits
from phalanx.elastic.job_control import CONTROL, IMPOSSIBLE, HostState, JobState, MemberState, ScaleRequest
from phalanx.elastic.membership_messages import (
    DISAGREEMENT,
    FAILED,
    KEEPER,
    FromKeeper,
    JoinRequest,
    ToKeeper,
    pack,
    unpack,
)
from phalanx.elastic.stragglers import StepTiming, StragglerDetector
from phalanx.errors import ConfigurationError, FrameError, LinkClosedError, LinkTimeoutError
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link
from phalanx.transport.listener import Listener
from phalanx.transport.tls import TLS

logger = logging.getLogger(__name__)

TICK_S = 0.1
SEND_S = 2.0
"""For a message of some kilobytes. Who does not take it in this time is stopped, and is found out by its silence."""
SLOWEST_BYTES_PER_S = 1e6
"""A large result takes its time on a slow network."""
IDLE_S = 3600.0

_decoder: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)


class CoordinatorServer:
    """Serves a keeper from a listening socket, in threads of its own, until it is closed.

    Args:
        sockets: listening; owned from here on.
        secret, job: what processes must know and belong to.
        tls: if all that is said here is to be encrypted.
        evict: is told the task of a member that is to be killed. Called from a thread.
        over: is told the tasks of all members when they have finished; perhaps more than once. Called from a thread.
        failed: is called when the job cannot go on. Called from a thread.
        released: is told the task of a member that is sent away as fewer are wanted. Called from a thread.
        resized: is told how many members are wanted now. Called from a thread.
        note: is told what happens, in words. Called from a thread.

    Attributes:
        hosts: on which members may run, for those who ask. Replaced as a whole.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        bounds: MembershipLimits,
        *,
        secret: bytes,
        job: str,
        evict: Callable[[str], None],
        over: Callable[[list[str]], None],
        failed: Callable[[], None],
        resized: Callable[[int], None],
        released: Callable[[str], None],
        note: Callable[[str], None],
        tls: TLS | None = None,
    ):
        self._lock = threading.RLock()  # protects all below
        self._speakers: dict[str, _Speaker] = {}
        self._evict = evict
        self._resized = resized
        self._places = bounds.maximum
        self._statements: dict[str, TaskDescription] = {}
        self._paces = StragglerDetector(timeout_s=bounds.timeout_s)
        self._note = note
        self.hosts: list[HostState] = []
        self.keeper = ElasticCoordinator(
            bounds,
            time.monotonic(),
            send=self._post,
            evict=self._evicted,
            over=over,
            failed=failed,
            released=released,
            note=note,
        )
        self._closed = threading.Event()
        self._listener = Listener(sockets, task="the launcher", secret=secret, job=job, tls=tls)
        self._listener.register(KEEPER, self)
        self._listener.register(CONTROL, _Control(self))
        self._listener.start()
        self._clock = threading.Thread(target=self._tick, name="phalanx-keeper", daemon=True)
        self._clock.start()

    def use(self, action: Callable[[ElasticCoordinator, float], None]) -> None:
        """Do something with the keeper, from any thread."""
        with self._lock:
            action(self.keeper, time.monotonic())

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self._clock.join()
        with self._lock:
            speakers = list(self._speakers.values())
            self._speakers.clear()
        for speaker in speakers:
            speaker.finish()
        until = time.monotonic() + SEND_S
        for speaker in speakers:
            speaker.join(max(0.0, until - time.monotonic()))

    # The service of the listener.

    def admit(self, hello: Hello) -> Welcome:
        try:
            newcomer = msgspec.msgpack.decode(hello.details, type=JoinRequest)
            statement = msgspec.msgpack.decode(newcomer.statement, type=TaskDescription)
        except msgspec.MsgspecError as error:
            return Welcome(refusal=DISAGREEMENT, reason=f"{hello.task} runs another version of Phalanx ({error}).")
        with self._lock:
            if self.keeper.failure:
                return Welcome(refusal=FAILED, reason=f"The job cannot go on: {self.keeper.failure}.")
            if reason := self.keeper.disagreement(statement):
                return Welcome(refusal=DISAGREEMENT, reason=reason)
            situation = self.keeper.arrive(statement, time.monotonic())
            self._statements[statement.incarnation] = statement
        return Welcome(details=msgspec.msgpack.encode(situation))

    def adopt(self, hello: Hello, link: Link) -> None:
        speaker = _Speaker(hello.task, link)
        speaker.start()
        with self._lock:
            self._speakers[hello.incarnation] = speaker
        threading.Thread(
            target=self._listen, args=(hello.incarnation, link), name=f"phalanx-keeper-{hello.task}", daemon=True
        ).start()

    def control(self, wish: ScaleRequest) -> JobState:
        """Fulfil a wish, and say how things stand.

        Raises: ConfigurationError if it cannot be fulfilled.
        """
        with self._lock:
            now = time.monotonic()
            if wish.workers is not None:
                bounds = self.keeper.bounds
                if not bounds.minimum <= wish.workers <= self._places:
                    raise ConfigurationError(
                        f"{wish.workers} workers are wanted, but the job was started with --workers "
                        f"{bounds.minimum}:{self._places}: it takes {bounds.minimum} to {self._places}."
                    )
                self.keeper.resize(bounds.minimum, wish.workers, now)
                self._resized(wish.workers)
            return self._state(now)

    def _state(self, now: float) -> JobState:
        keeper = self.keeper
        ranks = {incarnation: rank for rank, incarnation in enumerate(keeper.members)}
        states = [
            MemberState(
                rank=ranks.get(incarnation, -1),
                task=person.task,
                host=person.statement.host,
                pid=person.statement.pid,
                phase=person.pulse.phase,
                epoch=person.pulse.epoch,
                step=person.pulse.step,
                age_s=person.pulse.age_s,
                silent_s=now - person.heard_at,
                compute_s=None if (pace := self._paces.pace(incarnation)) is None else pace.compute_s,
                wait_s=None if pace is None else pace.wait_s,
                slow=self._paces.is_slow(incarnation),
            )
            for incarnation, person in keeper.people.items()
        ]
        chief = keeper.people.get(keeper.members[0]) if keeper.members else None
        return JobState(
            generation=keeper.generation,
            minimum=keeper.bounds.minimum,
            maximum=keeper.bounds.maximum,
            regrouping=keeper.is_regrouping,
            steps_per_s=0.0 if chief is None else chief.pulse.steps_per_s,
            members=sorted(states, key=lambda state: (state.rank < 0, state.rank)),
            hosts=self.hosts,
        )

    # Threads.

    def _listen(self, incarnation: str, link: Link) -> None:
        while True:
            try:
                message = unpack(_decoder, *link.receive(deadline=time.monotonic() + IDLE_S))
            except LinkTimeoutError:
                continue
            except (LinkClosedError, FrameError, msgspec.MsgspecError) as error:
                logger.debug("the keeper's link to %s ended: %s", link.peer, error)
                break
            self.use(lambda keeper, now, message=message: self._hear(incarnation, message, now))  # type: ignore[misc]
        with self._lock:
            speaker = self._speakers.pop(incarnation, None)
        if speaker is not None:
            speaker.finish()
        self.use(lambda keeper, now: keeper.depart(incarnation, now))
        link.close()

    def _hear(self, incarnation: str, message: ToKeeper, now: float) -> None:
        if isinstance(message, StepTiming):
            self._paces.hear(incarnation, message, now)
        self.keeper.hear(incarnation, message, now)

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            self.use(lambda keeper, now: self._pass(now))

    def _pass(self, now: float) -> None:
        """Some time has passed."""
        keeper = self.keeper
        keeper.tick(now)
        names = {i: f"{keeper.people[i].task} (rank {rank})" for rank, i in enumerate(keeper.members)}
        for text in self._paces.judge(names, keeper.generation, now):
            self._note(text)

    # What the keeper asks for, in the middle of a decision: nothing here waits for anybody.

    def _post(self, incarnation: str, message: FromKeeper) -> None:
        if speaker := self._speakers.get(incarnation):
            speaker.say(message)

    def _evicted(self, incarnation: str) -> None:
        if statement := self._statements.get(incarnation):
            self._evict(statement.task)


class _Speaker(threading.Thread):
    """Sends to one process, so that one that is stopped, or reads a large result, holds up nobody else."""

    def __init__(self, task: str, link: Link):
        super().__init__(name=f"phalanx-keeper-to-{task}", daemon=True)
        self._link = link
        self._messages: queue.SimpleQueue[FromKeeper | None] = queue.SimpleQueue()

    def say(self, message: FromKeeper) -> None:
        self._messages.put(message)

    def finish(self) -> None:
        """End when all has been sent."""
        self._messages.put(None)

    def run(self) -> None:
        while (message := self._messages.get()) is not None:
            header, buffers = pack(message)
            deadline = time.monotonic() + SEND_S + sum(map(len, buffers)) / SLOWEST_BYTES_PER_S
            with contextlib.suppress(LinkClosedError, LinkTimeoutError):  # who listens to it hears of it
                self._link.send(header, buffers, deadline=deadline)
        self._link.finish()


class _Control:
    """Answers people; the answer is all in the `Welcome`."""

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
