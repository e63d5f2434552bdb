"""Runs the operations that a process requests: handles, the background thread, execution.

Theory
------
A rank that waits for nothing sends nothing. A rank that waits for an operation takes part in rounds until it is done.
A round is a collective: it starts when all ranks have arrived, and ends with the same results on all of them
(`negotiator`). Operations that are ready run immediately, in the same thread; a rank whose operation is not ready
enters the next round. A rank that is absent from a round waits for nothing, and arrives as soon as it does.

One thread at a time takes part in rounds. A thread that waits for a handle runs the rounds itself, which avoids a
thread switch. If no thread waits (`*_async`, while the program computes), a background thread runs them. It starts with
the first asynchronous operation and sleeps while nothing is requested.

Locks
-----
`_changed` protects the requests and the state of the threads; it is held for short updates only. `_round_lock` is held
by the thread that runs rounds and protects the communicator and the negotiator. A thread that holds `_round_lock` may
acquire `_changed`, never the reverse.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from phalanx.collectives.autotune.trial_search import TrialSearch
from phalanx.collectives.communicator import ReduceOp
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.errors import CollectiveMismatchError, PhalanxError
from phalanx.horovod.common.exceptions import DuplicateNameError, HorovodInternalError
from phalanx.horovod.execution import OperationBuffers, execute
from phalanx.horovod.fusion_autotune import FusionAutotuner, FusionSettings
from phalanx.horovod.horovod_environment import HorovodEnvironment
from phalanx.horovod.negotiation import NegotiationResult, fuse
from phalanx.horovod.negotiator import Negotiator
from phalanx.horovod.operation_request import Request
from phalanx.monitoring import timeline


class OperationHandle:
    """A requested operation. `Controller.wait` waits for its result."""

    __slots__ = ("buffers", "done", "error", "request", "requested_at")

    def __init__(self, request: Request, buffers: OperationBuffers):
        self.request = request
        self.buffers = buffers
        self.done = False
        self.error: BaseException | None = None
        self.requested_at = time.monotonic()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the operation as done, or as failed."""
        # `done` is set last: threads read it without a lock, and then `error` and the result in `buffers`.
        self.error, self.done = error, True


class Controller:
    """The operations of this process on a communicator.

    All public methods may be called from any thread.

    Args:
        communicator: The communicator. The controller closes it, and nothing else may use it.
        environment: Horovod's variables.
        timeout_s: Seconds after which an operation that other ranks do not request ends the job.
        names: Names of the ranks for messages.
        on_tuned: If given, the threshold and cycle time of `environment` are the start of a search for better ones, and
            this is called with the search when it ends; given on all ranks or on none.

    Attributes:
        communicator: The communicator of the ranks.
        automatic_names: Counters of the unnamed operations, by kind.
    """

    def __init__(
        self,
        communicator: HostCommunicator,
        environment: HorovodEnvironment,
        timeout_s: float,
        names: Sequence[str],
        *,
        on_tuned: Callable[[TrialSearch[FusionSettings]], None] | None = None,
    ):
        self.communicator = communicator
        self.automatic_names: dict[str, itertools.count[int]] = {}
        self._negotiator = Negotiator(communicator, environment, timeout_s, names)
        # Used and replaced by the thread that runs rounds. Equal on all ranks in each: `fuse` must cut equal batches.
        self._fusion = FusionSettings(environment.fusion_bytes, environment.cycle_s)
        self._tuner = None if on_tuned is None else FusionAutotuner(self._fusion, self._max_over_ranks, on_tuned)
        self._round_lock = threading.Lock()

        self._changed = threading.Condition()  # protects what follows
        # What this rank announces in each round. Only the thread that runs rounds removes single entries, when done.
        self._waiting: dict[str, OperationHandle] = {}
        self._queued: dict[str, deque[OperationHandle]] = {}  # under automatic names that are still in use
        self._join: OperationHandle | None = None  # wakes no thread: the waiting caller runs the rounds
        self._failure: BaseException | None = None  # the first cause; set once, after which no round starts
        self._is_closed = False
        self._thread: threading.Thread | None = None  # started by the first asynchronous operation
        self._is_idle = False  # whether the background thread sleeps
        self._waiters = 0  # number of threads that wait while another one runs rounds

    # --------------------------------------------------------------------------------------------- requesting, waiting

    def submit(
        self, request: Request, buffers: OperationBuffers, *, wake: bool, queue: bool = False
    ) -> OperationHandle:
        """Request an operation. The arrays belong to it until it is done.

        Args:
            request: The properties that must be equal on all ranks.
            buffers: This rank's arrays.
            wake: Whether to wake the background thread; False if the caller waits immediately.
            queue: Whether an operation whose name is in use starts when the other is done; otherwise this is an error.

        Raises:
            DuplicateNameError: an operation of that name is in progress.
            HorovodInternalError: collectives have failed before.
        """
        handle = OperationHandle(request, buffers)
        with self._changed:
            self._check_usable()
            if request.name not in self._waiting:
                self._waiting[request.name] = handle
            elif queue:
                self._queued.setdefault(request.name, deque()).append(handle)
            else:
                raise DuplicateNameError(
                    f"{request.name!r} is already running: an operation of this name has not finished. Give "
                    f"operations that run at the same time different names, or synchronize first."
                )
            if wake:
                self._wake()
        return handle

    def join(self) -> int:
        """Contribute zeros to reductions until all ranks have joined; return the last rank that did."""
        handle = OperationHandle(Request("join", "join"), OperationBuffers(()))
        with self._changed:
            self._check_usable()
            if self._join is not None:
                raise HorovodInternalError("this rank has joined already and waits for the others.")
            self._join = handle
        self.wait(handle)
        last: int = handle.buffers.result
        return last

    def wait(self, handle: OperationHandle) -> None:
        """Wait until an operation is done. Its result is in `handle.buffers.result`.

        Raises: HorovodInternalError if it failed.
        """
        while not handle.done:
            if self._round_lock.acquire(blocking=False):
                try:
                    self._run_rounds(lambda: not handle.done)
                finally:
                    self._release()
            else:
                with self._changed:
                    # Counted before `_round_lock` is read, while `_release` reads the count after it has released the
                    # lock: one of the two notices the other.
                    self._waiters += 1
                    self._changed.wait_for(lambda: handle.done or not self._round_lock.locked())
                    self._waiters -= 1
        if handle.error is not None:
            raise handle.error

    @property
    def failure(self) -> BaseException | None:
        """Why collectives are no longer possible; None while they are.

        Stored because a caller may catch an error and raise it again without its `__cause__`, as Keras's `fit` does.
        """
        return self._failure

    def close(self, *, error: Exception | None = None) -> None:
        """Stop the controller and fail the operations in progress. Safe to call twice.

        Args:
            error: If given, the other ranks receive this error in their next collective, and must stop as well.
        """
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._fail(PhalanxError("Horovod has been shut down."))
        if not self._round_lock.acquire(blocking=False):
            # The round may wait minutes for ranks that request nothing.
            self.communicator.runner.interrupt()
            self._round_lock.acquire()
        # No collective runs or starts after this line: any thread that runs rounds finds `_failure` set.
        self._round_lock.release()
        if self._thread is not None:
            self._thread.join()
        if error is not None:
            self.communicator.runner.give_up(error)
        self.communicator.close()

    # ---------------------------------------------------------------------------------------------------------- rounds

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise HorovodInternalError.of(self._failure)

    def _wake(self) -> None:
        """Wake or start the background thread, which then runs rounds; called under `_changed`."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"phalanx-horovod-{self.communicator.rank}", daemon=True
            )
            self._thread.start()
        elif self._is_idle:
            self._changed.notify_all()

    def _run(self) -> None:
        """Run the background thread."""
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.wait_for(
                    lambda: self._is_closed or (bool(self._waiting) and not self._round_lock.locked())
                )
                self._is_idle = False
                if self._is_closed:
                    return
            # The program may be about to request more, or to wait and run the rounds itself.
            time.sleep(self._fusion.cycle_s)
            if self._round_lock.acquire(blocking=False):
                try:
                    self._run_rounds(lambda: bool(self._waiting) and not self._is_closed)
                finally:
                    self._release()

    def _release(self) -> None:
        """Let a waiting thread take over the rounds."""
        self._round_lock.release()
        with self._changed:
            # Waking a thread that has nothing to do would cost as much as a small operation.
            if self._waiters or (self._waiting and self._is_idle):
                self._changed.notify_all()

    def _run_rounds(self, is_wanted: Callable[[], bool]) -> None:
        while is_wanted() and self._failure is None:
            try:
                has_advanced = self._run_round()
            except BaseException as error:
                # Ranks may now be at different points of the round, so no round can follow. The handles have the
                # error; an interrupt is also raised where it hit the program.
                with self._changed:
                    self._fail(error)
                if not isinstance(error, Exception):
                    raise
                return
            if not has_advanced:
                # All ranks have arrived and wait for different operations: one of them must request more first.
                time.sleep(self._fusion.cycle_s)

    def _run_round(self) -> bool:
        """Take part in one round and run the ready operations; return whether there were any."""
        with self._changed:
            waiting, is_joining = dict(self._waiting), self._join is not None
        # Without the lock: the exchange takes as long as the slowest rank, and programs request more meanwhile.
        results, last_joined = self._negotiator.negotiate(waiting, is_joining=is_joining)
        if last_joined is not None:
            self._finish_join(last_joined)
        self._execute(results, waiting)
        return bool(results)

    def _finish_join(self, last: int) -> None:
        with self._changed:
            handle, self._join = self._join, None
            assert handle is not None, "this rank has joined, too"
            # Some ranks have made calls that others have not, so all restart their counters at zero.
            self.automatic_names.clear()
            handle.buffers.result = last
            handle.finish()

    def _execute(self, results: Sequence[NegotiationResult], waiting: Mapping[str, OperationHandle]) -> None:
        """Run the ready operations with this rank's handles of the round. Meanwhile `_waiting` may hold fewer (after
        `close`, so this rank would contribute zeros) or newer ones (after `join`, which were not negotiated)."""
        for result in results:
            if result.error:
                error = HorovodInternalError.of(CollectiveMismatchError(result.error))
                self._finish([result.request.name], waiting, error)
        ready = [result.request for result in results if not result.error]
        for batch in fuse(ready, self._fusion.threshold):
            handles = [waiting.get(request.name) for request in batch]  # None: this rank has joined
            started = timeline.now()
            execute(self.communicator, batch, [None if handle is None else handle.buffers for handle in handles])
            if timeline.current.on:
                _record(handles, started)
            self._finish([request.name for request in batch], waiting)
        if self._tuner is not None and ready:
            # The time of a round counts toward the current settings; the next round may use others.
            self._tuner.record_round(sum(request.nbytes for request in ready))
            self._fusion = self._tuner.settings
            if self._tuner.is_finished:
                self._tuner = None

    def _max_over_ranks(self, numbers: Sequence[float]) -> list[float]:
        # A collective between two rounds: the tuner calls this on all ranks after the same round.
        (merged,) = self.communicator.all_reduce([np.array(numbers)], ReduceOp.MAX)
        return [float(number) for number in merged]

    def _finish(
        self, names: Sequence[str], waiting: Mapping[str, OperationHandle], error: HorovodInternalError | None = None
    ) -> None:
        stalls = self._negotiator.stalls
        with self._changed:
            for name in names:
                stalls.forget(name)
                handle = waiting.get(name)
                if handle is None or self._waiting.get(name) is not handle:
                    continue  # this rank has joined, or all handles have failed meanwhile
                del self._waiting[name]
                handle.finish(error)
                if name in self._queued:
                    self._waiting[name] = self._queued[name].popleft()
                    if not self._queued[name]:
                        del self._queued[name]
            if self._waiters:
                self._changed.notify_all()

    def _fail(self, cause: BaseException) -> None:
        """Disable collectives. Every handle gets a separate error with the first cause."""
        self._failure = self._failure or cause
        queued = (each for queue in self._queued.values() for each in queue)
        for handle in (*self._waiting.values(), *queued, self._join):
            if handle is not None:
                handle.finish(HorovodInternalError.of(self._failure))
        self._waiting.clear()
        self._queued.clear()
        self._join = None
        self._changed.notify_all()


def _record(handles: Sequence[OperationHandle | None], started_ns: int) -> None:
    """Record in the timeline how long operations were negotiated, and how long they took when fused."""
    ended_ns = timeline.now()
    for handle in handles:
        if handle is not None:
            request, kind = handle.request, handle.request.kind.upper()
            requested_ns = min(int(handle.requested_at * 1e9), started_ns)
            args = {"bytes": request.nbytes, "together with": len(handles) - 1}
            negotiation = timeline.TimelinePart(f"NEGOTIATE_{kind}", started_ns)
            timeline.current.across(
                request.name, requested_ns, [negotiation, timeline.TimelinePart(kind, ended_ns, args)]
            )
