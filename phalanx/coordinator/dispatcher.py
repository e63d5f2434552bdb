"""Sends scheduled functions to workers, and lets callers wait for them.

`function_assignment` decides which function runs where, and how often it is retried. One condition protects all shared
state, including that of the links (`accepted_workers`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from phalanx.cluster.peer_identification import identify_task
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.coordinator.accepted_workers import AcceptedWorkers
from phalanx.coordinator.coordinator_messages import Answer, FunctionRaised, FunctionReturned, Pong, WorkerFailed
from phalanx.coordinator.remote_values import RemoteValue
from phalanx.coordinator.scheduled_calls import ScheduledCall, ScheduledCalls
from phalanx.coordinator.worker_connection import WorkerConnection
from phalanx.errors import PeerLostError, PhalanxError, RendezvousError
from phalanx.runtime import function_call as calls
from phalanx.runtime.worker_traceback import WorkerTraceback

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Longest time between two checks of the clock, in seconds. Every change of state ends the wait immediately."""
PROBE_TIMEOUT_S = 5.0
"""Seconds within which a server must answer a probe after a worker has lost it."""


class Dispatcher:
    """Runs functions on workers.

    Args:
        me: This task.
        on_answer: Called with each result that counts: the pickle of its effects, and the worker's global step. Calls
            do not overlap.
        silent: Names of silent workers; see `AcceptedWorkers`.

    Attributes:
        workers: The connected workers.
        on_answer: The callback for results; see the argument.
    """

    def __init__(self, me: TaskIdentity, on_answer: Callable[[memoryview, int], None], silent: set[str]) -> None:
        self._me = me
        self.on_answer = on_answer
        self._changed = threading.Condition()  # protects all attributes below
        self.workers = AcceptedWorkers(me, self._changed, self, silent)
        self._calls = ScheduledCalls()
        self._no_workers_since = time.monotonic()  # when the last worker left; stale while one is connected
        self._has_had_workers = False
        self._paused = False  # no function is assigned

    def start(self) -> None:
        """Start listening."""
        self.workers.start()

    def accept(self, purpose: str) -> None:
        """Accept workers that connect for this purpose."""
        self._no_workers_since = time.monotonic()
        self.workers.accept(purpose)

    # Called by the program's thread.

    def add(self, call: ScheduledCall) -> None:
        """Schedule a call. Raises the error of a call that has failed since the last time."""
        with self._changed:
            self.raise_failure()
            self._calls.add(call)
            self._changed.notify_all()

    def is_done(self) -> bool:
        """Whether all calls have finished. Raises the same errors as `join`."""
        with self._changed:
            self.raise_failure()
            if self._calls.assignment.unfinished and not self.workers:
                self._fail_without_workers()
                self.raise_failure()
            return not self._calls.assignment.unfinished

    def raise_failure(self) -> None:
        """If a call, or a worker in a model's method, has failed, wait until none runs and raise its error once."""
        with self._changed:
            if self._calls.has_failed:
                self.join()

    def join(self) -> None:
        """Wait until all calls have finished; raise the error of one that failed."""
        with self._changed:
            self._wait(lambda: not self._calls.assignment.unfinished)
            self._calls.raise_failure()

    @contextlib.contextmanager
    def paused(self) -> Iterator[bool]:
        """Run no function inside the block. Yields whether some are waiting to run afterwards."""
        with self._changed:
            self._paused = True
        try:
            with self._changed:
                self._wait(lambda: not self._calls.assignment.running)
                waiting = bool(self._calls.assignment.unfinished)
            yield waiting
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def wait_for(self, result: RemoteValue) -> None:
        """Wait until a call has finished, successfully or not."""
        with self._changed:
            self._wait(lambda: result.is_finished)

    def wait_for_worker(self) -> bool:
        """Wait until a worker is connected. Returns whether there is one that runs no program of its own.

        Raises: RendezvousError or PeerLostError if none connects in time.
        """
        with self._changed:
            self._wait(lambda: bool(self.workers) or self._calls.has_failed)
            self._calls.raise_failure()
            return self.workers.has_worker_servers

    def close(self) -> None:
        """Stop all workers and close the port. Safe to call twice."""
        self.workers.close()

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait with the lock held, but not forever if there is no worker."""
        # A connected worker may compute for any length of time: its link reports when it is lost.
        while not condition():
            if not self.workers:
                self._fail_without_workers()
            self._changed.wait(POLL_S)

    def _fail_without_workers(self) -> None:
        config = self._me.config
        limit_s = config.timeout_s if self._has_had_workers else max(config.rendezvous_timeout_s, config.timeout_s)
        if time.monotonic() - self._no_workers_since >= limit_s:
            # Raised by each result that a caller waits for, and by `join`.
            names = self.workers.names.values()
            self._calls.fail_all(_no_worker_error(names, limit_s, were_here=self._has_had_workers))
            self._changed.notify_all()

    # Events of workers. `worker_joined`, `worker_lost` and `assign_next` are called with the lock held.

    def worker_joined(self, worker: WorkerConnection) -> None:
        """Record that a worker has connected."""
        self._has_had_workers = True
        self._calls.give_up(self._calls.assignment.add_worker(worker.number, worker.incarnation), worker.name)

    def worker_lost(self, worker: WorkerConnection) -> None:
        """Record that a worker is lost."""
        if not self.workers:
            self._no_workers_since = time.monotonic()
        self._calls.give_up(self._calls.assignment.remove_worker(worker.number, worker.incarnation), worker.name)

    def assign_next(self, worker: WorkerConnection) -> bool:
        """Put the next function, if there is one, into the outbox of a worker that has nothing else to do."""
        number = None if self._paused else self._calls.assignment.assign_next(worker.number, worker.incarnation)
        if number is None:
            return False
        try:
            worker.enqueue(number, self._calls[number])
        except Exception as error:  # a large array may have been donated since the call was scheduled
            # Finished before it fails: the worker never receives it, so no answer would remove it from the queue.
            call = self._calls.finish(worker.number, worker.incarnation, number)
            assert call is not None, "it was handed out just now"
            self._calls.fail(call, error)
            self._changed.notify_all()
        return True

    def handle_answer(self, worker: WorkerConnection, answer: Answer, buffers: list[memoryview]) -> None:
        """Handle the answer of a worker."""
        if isinstance(answer, Pong):
            return
        if isinstance(answer, WorkerFailed):
            self.fail(_error_of(worker.name, buffers[0]))
            return
        # The fault is in the worker or its network: the call does not fail, but runs on another worker. If the server
        # does not answer here either, it is lost, and the call fails with the worker's error.
        if isinstance(answer, FunctionRaised) and answer.lost_server and _is_reachable(self._me, answer.lost_server):
            self.workers.lose(worker, f"it does not reach {answer.lost_server}, which answers here.")
            return
        raised = _error_of(worker.name, buffers[0]) if isinstance(answer, FunctionRaised) else None
        with self._changed:
            call = self._calls.finish(worker.number, worker.incarnation, answer.call)
            if call is None:
                return
            # Only answers that count get here, so metrics count a function once, however often it was run.
            if isinstance(answer, FunctionReturned):
                try:
                    self.on_answer(buffers[1], answer.global_step)
                    call.result.succeed(buffers[0])
                except Exception as error:  # its effects cannot be read here
                    raised = error
            if raised is not None:
                self._calls.fail(call, raised)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Fail all calls: a message for workers cannot be packed, or a worker has failed."""
        logger.error("%s", error)
        with self._changed:
            if not self._calls.has_failed:
                self._calls.fail_all(error)
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
    """Whether the task of this name answers a probe from this one."""
    if name == str(me.task):
        return True
    task = next((task for task in me.spec.tasks if str(task) == name), None)
    return task is not None and isinstance(identify_task(me, task, PROBE_TIMEOUT_S), TaskDescription)


def _error_of(name: str, pickle: memoryview) -> BaseException:
    """The error that a function raised on a worker."""
    try:
        raised = calls.decode_result(bytes(pickle))
    except Exception as error:
        # The error class may exist only on the worker.
        return PhalanxError(f"A function failed on {name} with an error that cannot be read here: {error!r}")
    assert isinstance(raised, calls.CallRaised), raised
    with contextlib.suppress(AttributeError, TypeError):  # an error class may not allow setting a cause
        raised.error.__cause__ = WorkerTraceback(name, raised.traceback)
    return raised.error
