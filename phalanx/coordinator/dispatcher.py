"""The coordinator's links: sends functions to workers, takes their answers, notices who is lost.

Each worker has a thread that sends to it and one that receives from it; what runs where the queue decides.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phalanx.cluster.admission import PROBE, ProbeService, admit_worker, link_name
from phalanx.cluster.compatibility import TaskDescription
from phalanx.cluster.peer_dialing import identify_task
from phalanx.cluster.peer_registry import TaskIdentity
from phalanx.coordinator.coordinator_messages import (
    FUNCTIONS_KEPT,
    Answer,
    Begin,
    CallFunction,
    ForgetObject,
    FunctionRaised,
    FunctionReturned,
    KeepObject,
    MakeObject,
    Order,
    Ping,
    Pong,
    StopWorker,
)
from phalanx.coordinator.function_queue import MAX_LOSSES, FunctionQueue
from phalanx.coordinator.remote_values import RemoteValue
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError, PeerLostError, PhalanxError, RendezvousError
from phalanx.runtime import function_call as calls
from phalanx.runtime.worker_traceback import WorkerTraceback
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

PURPOSE = "coordinator"
POLL_S = 0.5
"""Longest time between two looks at the clock; whatever happens wakes the waiting at once."""
PING_S = 5.0
"""Between two questions whether a worker is alive. Its death is noticed without them; that it is stopped is not."""
PROBE_S = 5.0
"""How long a server may take to say that it is there, when a worker has lost it."""
GOODBYE_S = 5.0
"""For taking leave: a worker that is busy is not waited for longer."""

_ANSWERS = msgspec.msgpack.Decoder(Answer)
_encode = msgspec.msgpack.Encoder().encode


_Message = tuple[Order, Sequence[bytes | memoryview]]


@dataclass
class ScheduledCall:
    """A function that is to run.

    Attributes:
        digest: of its pickle.
        function: its pickle; `arguments`: theirs.
        needs: results that they refer to.
        keeps: large values that they refer to: their number, and what pickles them.
        holds: what must live until it has run.
        result: where the result goes.
    """

    digest: bytes
    function: bytes
    arguments: bytes
    needs: Sequence[RemoteValue]
    keeps: dict[int, Callable[[], bytes]]
    holds: Sequence[Any]
    result: RemoteValue


@dataclass(eq=False)
class _Worker:
    """A worker that is here.

    Attributes:
        incarnation: of its process and this link.
        outbox: what it is told before the next function.
        has: digests of the functions that it has, those used last at the end.
        kept: numbers of the large values that it has.
    """

    number: int
    name: str
    incarnation: str
    link: Link
    outbox: deque[_Message]
    has: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    kept: set[int] = field(default_factory=set)
    told_at: float = field(default_factory=time.monotonic)


class Dispatcher:
    """Owns the listening port, the links to the workers and their threads.

    Args:
        me: this task.
        on_answer: called with each result that counts: its changes' pickle, the worker's global step. One at a time.
        silent: is kept: the names of workers that were lost because they do not answer, and have not come back.
    """

    def __init__(self, me: TaskIdentity, on_answer: Callable[[memoryview, int], None], silent: set[str]) -> None:
        self._me = me
        self._silent = silent
        self._on_answer = on_answer
        self._names = {rank: str(task) for rank, task in enumerate(me.tasks) if rank != me.rank}
        self._changed = threading.Condition()  # protects everything below
        self._queue = FunctionQueue()
        self._calls: dict[int, ScheduledCall] = {}
        self._workers: dict[int, _Worker] = {}
        self._news: list[tuple[Begin | MakeObject, Sequence[bytes]]] = []  # what a worker that comes later must hear
        self._failure: BaseException | None = None
        self._links_made = itertools.count()
        self._alone_since = time.monotonic()
        self._came: set[int] = set()
        self._closing = False
        self._paused = False
        self._listener = me.open_listener()
        self._listener.register(PURPOSE, self)
        self._listener.register(PROBE, ProbeService(me))

    def start(self) -> None:
        """Let workers come."""
        self._listener.start()

    # What the program's thread does.

    def add(self, call: ScheduledCall) -> None:
        """A function is to run; raises the error of one that has failed meanwhile."""
        with self._changed:
            self.raise_failure()
            self._calls[call.result.number] = call
            self._queue.add(call.result.number, [need.number for need in call.needs if not need.is_finished])
            self._changed.notify_all()

    def tell(self, order: Begin | MakeObject, buffers: Sequence[bytes] = ()) -> None:
        """Tell all workers, also those that come later; who come later hear the last `Begin` only."""
        with self._changed:
            if isinstance(order, Begin):
                self._news = [(known, data) for known, data in self._news if not isinstance(known, Begin)]
            self._news.append((order, buffers))
            for worker in self._workers.values():
                worker.outbox.append((order, buffers))
            self._changed.notify_all()

    def forget(self, number: int) -> None:
        """Nobody refers to the workers' own value, or the large array, of this number any more."""
        with self._changed:
            self._news = [
                (known, data) for known, data in self._news if isinstance(known, Begin) or known.number != number
            ]
            for worker in self._workers.values():
                worker.kept.discard(number)
                worker.outbox.append((ForgetObject(number), ()))
            self._changed.notify_all()

    def is_done(self) -> bool:
        """Whether all functions are finished; raises as `join`."""
        with self._changed:
            self.raise_failure()
            if self._queue.unfinished and not self._workers:
                self._give_up_if_late()
                self.raise_failure()
            return not self._queue.unfinished

    def raise_failure(self) -> None:
        """If a function has failed: wait until none runs, and raise its error, once."""
        with self._changed:
            if self._failure is not None:
                self._wait(lambda: not self._queue.unfinished)
                self._tell_failure()

    def join(self) -> None:
        """Wait until all functions are finished; raise the error of one that failed."""
        with self._changed:
            self._wait(lambda: not self._queue.unfinished)
            self._tell_failure()

    @contextlib.contextmanager
    def paused(self) -> Iterator[bool]:
        """While inside, no function runs. Gives whether some wait to go on after it."""
        with self._changed:
            self._paused = True
        try:
            with self._changed:
                self._wait(lambda: not self._queue.running)
                waiting = bool(self._queue.unfinished)
            yield waiting
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def wait_for(self, result: RemoteValue) -> None:
        """Wait until a function is finished, however it ends."""
        with self._changed:
            self._wait(lambda: result.is_finished)

    def close(self) -> None:
        """Take leave of all workers; safe to call twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            for worker in self._workers.values():
                worker.outbox.append((StopWorker(), ()))
            self._changed.notify_all()
            # They hang up; if we did, what they are sending could cost them the message.
            self._changed.wait_for(lambda: not self._workers, timeout=GOODBYE_S)
            links = [worker.link for worker in self._workers.values()]
        for link in links:
            link.close()
        self._listener.close()

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait with the lock held; not forever without a worker."""
        while not condition():
            if not self._workers:
                self._give_up_if_late()
            self._changed.wait(POLL_S)

    def _give_up_if_late(self) -> None:
        config = self._me.config
        patience_s = config.timeout_s if self._came else max(config.rendezvous_timeout_s, config.timeout_s)
        if time.monotonic() - self._alone_since < patience_s:
            return
        names = ", ".join(self._names.values())
        error: PhalanxError
        if self._came:
            error = PeerLostError(
                f"No worker is left to run functions: {names} are lost, and none came back within {patience_s:g} s. "
                f"Look at the end of their output for the cause.",
                rank=-1,
                task=names,
                host="",
            )
        else:
            error = RendezvousError(
                f"No worker came to run functions within {patience_s:g} s: {names} are missing. Each must run this "
                f"program, up to ClusterCoordinator(strategy)."
            )
        # Told to all who wait: for one of these functions by its result, for all of them by `_tell_failure`.
        for number in self._queue.fail():
            self._calls.pop(number).result.fail(error)
        self._failure = error
        self._changed.notify_all()

    def _tell_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._queue.clear_failure()
            raise failure

    # The listener's service.

    def admit(self, hello: Hello) -> Welcome:
        return admit_worker(self._me, hello, self._names, self._link_of)

    def _link_of(self, number: int) -> tuple[str, Link] | None:
        with self._changed:
            present = self._workers.get(number)
        return None if present is None else (present.incarnation, present.link)

    def adopt(self, hello: Hello, link: Link) -> None:
        number = self._me.rank_of(hello.task)
        assert number is not None, "checked when it was admitted"
        with self._changed:
            incarnation = link_name(hello.incarnation, next(self._links_made))
            worker = _Worker(number, hello.task, incarnation, link, deque(self._news))
            former = self._workers.get(number)
            if self._closing:
                worker.outbox.append((StopWorker(), ()))
            self._workers[number] = worker
            self._came.add(number)
            self._silent.discard(hello.task)
            self._account_for_lost(self._queue.enter(number, incarnation), hello.task)
            self._changed.notify_all()
        if former is not None:
            former.link.close()
        for body in (self._send_to, self._receive_from):
            threading.Thread(target=body, args=(worker,), name=f"phalanx-{hello.task}", daemon=True).start()

    # One worker's threads.

    def _send_to(self, worker: _Worker) -> None:
        try:
            while (message := self._next_message(worker)) is not None:
                order, buffers = message
                worker.link.send(
                    _encode(order), buffers, deadline=time.monotonic() + self._me.config.timeout_s + PING_S
                )
                worker.told_at = time.monotonic()
                if isinstance(order, StopWorker):
                    worker.link.finish()
                    return
        except (LinkClosedError, LinkTimeoutError, FrameError) as error:
            self._lose(worker, str(error))

    def _next_message(self, worker: _Worker) -> _Message | None:
        """What to send now; waits for it. None if it is gone."""
        with self._changed:
            while self._workers.get(worker.number) is worker:
                if worker.outbox:
                    return worker.outbox.popleft()
                number = None if self._paused else self._queue.next_for(worker.number, worker.incarnation)
                if number is not None:
                    self._put_out(worker, number)
                    continue
                if time.monotonic() - worker.told_at > PING_S:
                    return Ping(), ()
                self._changed.wait(PING_S)
            return None

    def _put_out(self, worker: _Worker, number: int) -> None:
        """A function for this worker, and before it what it refers to and the worker has not."""
        call = self._calls[number]
        try:
            for kept, pickle in call.keeps.items():
                if kept not in worker.kept:
                    worker.outbox.append((KeepObject(kept), [pickle()]))
                    worker.kept.add(kept)
        except Exception as error:  # it has changed since it was scheduled: an array may have been given away
            self._queue.finish(worker.number, worker.incarnation, number)
            self._fail(self._calls.pop(number), error)
            self._changed.notify_all()
            return
        is_new = call.digest not in worker.has
        worker.has[call.digest] = None
        worker.has.move_to_end(call.digest)
        if len(worker.has) > FUNCTIONS_KEPT:
            worker.has.popitem(last=False)
        results = tuple(need.number for need in call.needs)
        buffers: list[bytes | memoryview] = [
            *([call.function] if is_new else []),
            call.arguments,
            *[need.finished() for need in call.needs],
        ]
        worker.outbox.append((CallFunction(number, call.digest, is_new, results), buffers))

    def _receive_from(self, worker: _Worker) -> None:
        patience_s = self._me.config.timeout_s + PING_S
        try:
            while True:
                header, buffers = worker.link.receive(deadline=time.monotonic() + patience_s)
                self._take(worker, _ANSWERS.decode(header), buffers)
        except (LinkClosedError, LinkTimeoutError, FrameError, msgspec.MsgspecError) as error:
            if isinstance(error, LinkTimeoutError):
                self._silent.add(worker.name)
            self._lose(worker, str(error))

    def _take(self, worker: _Worker, answer: Answer, buffers: list[memoryview]) -> None:
        if isinstance(answer, Pong):
            return
        if isinstance(answer, FunctionRaised) and answer.missed and self._reaches(answer.missed):
            self._lose(worker, f"it does not reach {answer.missed}, which answers here.")
            return
        raised = _error_of(worker.name, buffers[0]) if isinstance(answer, FunctionRaised) else None
        with self._changed:
            if not self._queue.finish(worker.number, worker.incarnation, answer.call):
                return
            call = self._calls.pop(answer.call)
            if isinstance(answer, FunctionReturned):
                try:
                    self._on_answer(buffers[1], answer.global_step)
                    call.result.succeed(buffers[0])
                except Exception as error:  # what it counted cannot be read here
                    raised = error
            if raised is not None:
                self._fail(call, raised)
            self._changed.notify_all()

    def _reaches(self, name: str) -> bool:
        """Whether a task answers this one."""
        if name == str(self._me.task):
            return True
        task = next((task for task in self._me.spec.tasks if str(task) == name), None)
        return task is not None and isinstance(identify_task(self._me, task, PROBE_S), TaskDescription)

    def _lose(self, worker: _Worker, why: str) -> None:
        worker.link.close()
        with self._changed:
            if self._workers.get(worker.number) is not worker:
                return  # it has come back since
            del self._workers[worker.number]
            if not self._workers:
                self._alone_since = time.monotonic()
            if not self._closing:
                logger.warning("Lost %s: %s What it ran runs elsewhere.", worker.name, why)
            self._account_for_lost(self._queue.leave(worker.number, worker.incarnation), worker.name)
            self._changed.notify_all()

    # How functions end. With the lock held.

    def _account_for_lost(self, numbers: Iterable[int], name: str) -> None:
        """Functions that do not run again though their worker was lost."""
        for number in numbers:
            if self._queue.failing:
                self._cancel([number])
                continue
            error = PeerLostError(
                f"A function was given up: {MAX_LOSSES} workers were lost while they ran it, {name} last. Look at the "
                f"end of their output for the cause.",
                rank=-1,
                task=name,
                host="",
            )
            self._fail(self._calls.pop(number), error)

    def _fail(self, call: ScheduledCall, error: BaseException) -> None:
        call.result.fail(error)
        if self._failure is None:
            self._failure = error
        self._cancel(self._queue.fail())

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._calls.pop(number).result.cancel()


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
