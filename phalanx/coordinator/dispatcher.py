"""The coordinator's links: sends functions to workers, receives their answers, and notices lost workers.

Each worker has a thread that sends to it and one that receives from it. The queue decides which function runs where.
One condition protects all shared state; sockets are read and written without it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from phalanx.cluster.admission import PROBE, ProbeService, admit_worker, link_name
from phalanx.cluster.peer_dialing import identify_task
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.coordinator.coordinator_messages import (
    Answer,
    Begin,
    ForgetObject,
    FunctionRaised,
    FunctionReturned,
    MakeObject,
    Ping,
    Pong,
    StopWorker,
)
from phalanx.coordinator.remote_values import RemoteValue
from phalanx.coordinator.scheduled_calls import ScheduledCall, ScheduledCalls
from phalanx.coordinator.worker_connection import Message, WorkerConnection
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError, PeerLostError, PhalanxError, RendezvousError
from phalanx.runtime import function_call as calls
from phalanx.runtime.worker_traceback import WorkerTraceback
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

PURPOSE = "coordinator"
POLL_S = 0.5
"""Longest time between two checks of the clock. Every change of state ends the wait at once."""
PING_S = 5.0
"""Between two pings. A worker's death is noticed without them; that it is stopped is not."""
PROBE_S = 5.0
"""How long a server may take to answer a probe after a worker has lost it."""
CLOSE_S = 5.0
"""How long `close` waits for busy workers."""

_ANSWERS = msgspec.msgpack.Decoder(Answer)
_encode = msgspec.msgpack.Encoder().encode


class Dispatcher:
    """Owns the listening port, the links to the workers and their threads.

    Args:
        me: this task.
        on_answer: called with each result that counts: the pickle of its effects, and the worker's global step.
            Calls do not overlap.
        silent: names of workers that were lost because they did not answer, and have not returned. Kept up to date.
    """

    def __init__(self, me: TaskIdentity, on_answer: Callable[[memoryview, int], None], silent: set[str]) -> None:
        self._me = me
        self._silent = silent
        self._on_answer = on_answer
        self._names = {rank: str(task) for rank, task in enumerate(me.tasks) if rank != me.rank}
        self._changed = threading.Condition()  # protects all attributes below
        self._calls = ScheduledCalls()
        self._workers: dict[int, WorkerConnection] = {}
        self._broadcasts: list[tuple[Begin | MakeObject, Sequence[bytes]]] = []  # also sent to workers that join later
        self._link_numbers = itertools.count()
        self._alone_since = time.monotonic()
        self._has_had_workers = False
        self._closing = False
        self._paused = False
        self._listener = me.open_listener()
        self._listener.register(PURPOSE, self)
        self._listener.register(PROBE, ProbeService(me))

    def start(self) -> None:
        """Accept workers."""
        self._listener.start()

    # Called by the program's thread.

    def add(self, call: ScheduledCall) -> None:
        """Schedule a call. Raises the error of one that has failed since the last call."""
        with self._changed:
            self.raise_failure()
            self._calls.add(call)
            self._changed.notify_all()

    def broadcast(self, order: Begin | MakeObject, buffers: Sequence[bytes] = ()) -> None:
        """Send a message to all workers, and to those that join later; these receive only the last `Begin`."""
        with self._changed:
            if isinstance(order, Begin):
                self._broadcasts = [sent for sent in self._broadcasts if not isinstance(sent[0], Begin)]
            self._broadcasts.append((order, buffers))
            for worker in self._workers.values():
                worker.outbox.append((order, buffers))
            self._changed.notify_all()

    def forget(self, number: int) -> None:
        """Let workers drop the per-worker value, or the large array, of this number."""
        with self._changed:
            self._broadcasts = [
                (order, buffers)
                for order, buffers in self._broadcasts
                if isinstance(order, Begin) or order.number != number
            ]
            for worker in self._workers.values():
                worker.kept.discard(number)
                worker.outbox.append((ForgetObject(number), ()))
            self._changed.notify_all()

    def is_done(self) -> bool:
        """Whether all calls are finished; raises as `join`."""
        with self._changed:
            self.raise_failure()
            if self._calls.queue.unfinished and not self._workers:
                self._fail_if_alone_too_long()
                self.raise_failure()
            return not self._calls.queue.unfinished

    def raise_failure(self) -> None:
        """If a call has failed, wait until none runs and raise its error, once."""
        with self._changed:
            if self._calls.has_failed:
                self.join()

    def join(self) -> None:
        """Wait until all calls are finished; raise the error of one that failed."""
        with self._changed:
            self._wait(lambda: not self._calls.queue.unfinished)
            self._calls.raise_failure()

    @contextlib.contextmanager
    def paused(self) -> Iterator[bool]:
        """While inside, no function runs. Yields whether some are waiting to run afterwards."""
        with self._changed:
            self._paused = True
        try:
            with self._changed:
                self._wait(lambda: not self._calls.queue.running)
                waiting = bool(self._calls.queue.unfinished)
            yield waiting
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def wait_for(self, result: RemoteValue) -> None:
        """Wait until a call is finished, successfully or not."""
        with self._changed:
            self._wait(lambda: result.is_finished)

    def close(self) -> None:
        """Stop all workers and close the port. Safe to call twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            for worker in self._workers.values():
                worker.outbox.append((StopWorker(), ()))
            self._changed.notify_all()
            # The workers hang up. If this end did, a message that they are sending could lose them ours.
            self._changed.wait_for(lambda: not self._workers, timeout=CLOSE_S)
            links = [worker.link for worker in self._workers.values()]
        for link in links:
            link.close()
        self._listener.close()

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait with the lock held, but not forever without a worker."""
        while not condition():
            if not self._workers:
                self._fail_if_alone_too_long()
            self._changed.wait(POLL_S)

    def _fail_if_alone_too_long(self) -> None:
        config = self._me.config
        limit_s = config.timeout_s if self._has_had_workers else max(config.rendezvous_timeout_s, config.timeout_s)
        if time.monotonic() - self._alone_since >= limit_s:
            # Raised by each result that a caller waits for, and by `join`.
            self._calls.fail_all(_no_worker_error(self._names.values(), limit_s, were_here=self._has_had_workers))
            self._changed.notify_all()

    # The listener's service.

    def admit(self, hello: Hello) -> Welcome:
        def link_of(number: int) -> tuple[str, Link] | None:
            with self._changed:
                present = self._workers.get(number)
            return None if present is None else (present.incarnation, present.link)

        return admit_worker(self._me, hello, self._names, link_of)

    def adopt(self, hello: Hello, link: Link) -> None:
        number = self._me.rank_of(hello.task)
        assert number is not None, "checked when it was admitted"
        with self._changed:
            incarnation = link_name(hello.incarnation, next(self._link_numbers))
            worker = WorkerConnection(number, hello.task, incarnation, link, deque(self._broadcasts))
            former = self._workers.get(number)
            if self._closing:
                worker.outbox.append((StopWorker(), ()))
            self._workers[number] = worker
            self._has_had_workers = True
            self._silent.discard(hello.task)
            self._calls.give_up(self._calls.queue.enter(number, incarnation), hello.task)
            self._changed.notify_all()
        if former is not None:
            former.link.close()
        for body in (self._send_to, self._receive_from):
            threading.Thread(target=body, args=(worker,), name=f"phalanx-{hello.task}", daemon=True).start()

    # The threads of one worker.

    def _send_to(self, worker: WorkerConnection) -> None:
        try:
            while (message := self._next_message(worker)) is not None:
                order, buffers = message
                worker.link.send(
                    _encode(order), buffers, deadline=time.monotonic() + self._me.config.timeout_s + PING_S
                )
                worker.last_sent_at = time.monotonic()
                if isinstance(order, StopWorker):
                    worker.link.finish()
                    return
        except (LinkClosedError, LinkTimeoutError, FrameError) as error:
            self._lose(worker, str(error))

    def _next_message(self, worker: WorkerConnection) -> Message | None:
        """Wait for the next message to this worker; None once it is gone."""
        with self._changed:
            while self._workers.get(worker.number) is worker:
                if worker.outbox:
                    return worker.outbox.popleft()
                number = None if self._paused else self._calls.queue.next_for(worker.number, worker.incarnation)
                if number is not None:
                    try:
                        worker.enqueue(number, self._calls[number])
                    except Exception as error:  # a large array may have been donated since the call was scheduled
                        call = self._calls.finish(worker.number, worker.incarnation, number)
                        assert call is not None, "it was handed out just now"
                        self._calls.fail(call, error)
                        self._changed.notify_all()
                    continue
                if time.monotonic() - worker.last_sent_at > PING_S:
                    return Ping(), ()
                self._changed.wait(PING_S)
            return None

    def _receive_from(self, worker: WorkerConnection) -> None:
        limit_s = self._me.config.timeout_s + PING_S
        try:
            while True:
                header, buffers = worker.link.receive(deadline=time.monotonic() + limit_s)
                self._handle(worker, _ANSWERS.decode(header), buffers)
        except (LinkClosedError, LinkTimeoutError, FrameError, msgspec.MsgspecError) as error:
            if isinstance(error, LinkTimeoutError):
                self._silent.add(worker.name)
            self._lose(worker, str(error))

    def _handle(self, worker: WorkerConnection, answer: Answer, buffers: list[memoryview]) -> None:
        if isinstance(answer, Pong):
            return
        if isinstance(answer, FunctionRaised) and answer.missed and _is_reachable(self._me, answer.missed):
            self._lose(worker, f"it does not reach {answer.missed}, which answers here.")
            return
        raised = _error_of(worker.name, buffers[0]) if isinstance(answer, FunctionRaised) else None
        with self._changed:
            call = self._calls.finish(worker.number, worker.incarnation, answer.call)
            if call is None:
                return
            if isinstance(answer, FunctionReturned):
                try:
                    self._on_answer(buffers[1], answer.global_step)
                    call.result.succeed(buffers[0])
                except Exception as error:  # its effects cannot be read here
                    raised = error
            if raised is not None:
                self._calls.fail(call, raised)
            self._changed.notify_all()

    def _lose(self, worker: WorkerConnection, why: str) -> None:
        worker.link.close()
        with self._changed:
            if self._workers.get(worker.number) is not worker:
                return  # it has reconnected since
            del self._workers[worker.number]
            if not self._workers:
                self._alone_since = time.monotonic()
            if not self._closing:
                logger.warning("Lost %s: %s Its function runs on another worker.", worker.name, why)
            self._calls.give_up(self._calls.queue.leave(worker.number, worker.incarnation), worker.name)
            self._changed.notify_all()


def _no_worker_error(names: Iterable[str], limit_s: float, *, were_here: bool) -> PhalanxError:
    workers = ", ".join(names)
    if were_here:
        return PeerLostError(
            f"No worker is left to run functions: {workers} are lost, and none returned within {limit_s:g} s. "
            f"Look at the end of their output for the cause.",
            rank=-1,
            task=workers,
            host="",
        )
    return RendezvousError(
        f"No worker connected to run functions within {limit_s:g} s: {workers} are missing. Each must run this "
        f"program, up to ClusterCoordinator(strategy)."
    )


def _is_reachable(me: TaskIdentity, name: str) -> bool:
    """Whether the task of this name answers this one."""
    if name == str(me.task):
        return True
    task = next((task for task in me.spec.tasks if str(task) == name), None)
    return task is not None and isinstance(identify_task(me, task, PROBE_S), TaskDescription)


def _error_of(name: str, pickle: memoryview) -> BaseException:
    """The error that a function raised on a worker."""
    try:
        raised = calls.decode_result(bytes(pickle))
    except Exception as error:
        # Its class may be one that only the worker has.
        return PhalanxError(f"A function failed on {name} with an error that cannot be read here: {error!r}")
    assert isinstance(raised, calls.CallRaised), raised
    with contextlib.suppress(AttributeError, TypeError):  # an error class may allow no cause to be set
        raised.error.__cause__ = WorkerTraceback(name, raised.traceback)
    return raised.error
