"""Runs what one process asks for: handles, rounds of negotiation, the thread that works in the background.

Theory
------
A rank that waits for nothing sends nothing. A rank that waits for something takes part in rounds until it is done: a
round is a collective, so it begins when all ranks have come to it, and ends with the same verdicts on all of them
(`negotiation`). What is ready is done at once, in the same thread; a rank whose operation is not ready yet goes into
the next round. So nobody is missed: a rank that is absent from a round waits for nothing, and comes as soon as it does.

One thread at a time *drives*, that is, takes part in rounds. Whoever waits for a handle drives himself, without a
change of threads. Where nobody waits (`*_async`, and the program computes), a background thread drives, which is
started with the first asynchronous operation and sleeps while nothing is asked for.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from phalanx.collectives.autotune.trial_search import TrialSearch
from phalanx.collectives.communicator import ReduceOp
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.errors import CollectiveMismatchError, CollectiveTimeoutError, PhalanxError
from phalanx.horovod.exceptions import HorovodInternalError
from phalanx.horovod.execution import FusedPart, execute
from phalanx.horovod.fusion_autotune import FusionAutotuner, FusionSettings
from phalanx.horovod.horovod_environment import HorovodEnvironment
from phalanx.horovod.negotiation import NegotiationResult, RankRequests, RequestCache, absent, decide, fuse, refusal
from phalanx.horovod.operation_request import Request
from phalanx.horovod.stall_inspector import StallInspector
from phalanx.monitoring import timeline

_log = logging.getLogger(__name__)

_NEWS = 0
_BITS_FROM = 1
"""A round's bits: the first says that this rank has nothing new to tell, the others which known requests it wants."""


class OperationHandle:
    """One operation that was asked for. `controller.wait` gives its result."""

    __slots__ = ("asked_at", "done", "error", "part", "request")

    def __init__(self, request: Request, part: FusedPart):
        self.request = request
        self.part = part
        self.done = False
        self.error: BaseException | None = None
        self.asked_at = time.monotonic()


class Controller:
    """The operations of this process among the ranks of a communicator.

    All public methods may be called from any thread.

    Attributes:
        automatic_names: counts the operations without a name, by kind.

    Args:
        communicator: used by the controller alone from now on, and closed by it.
        names: of the ranks, for messages.
        tune: if given, threshold and cycle time of `knobs` are only where a search for better ones begins; told of its
            end. The same on all ranks.
    """

    def __init__(
        self,
        communicator: HostCommunicator,
        knobs: HorovodEnvironment,
        timeout_s: float,
        names: Sequence[str],
        *,
        tune: Callable[[TrialSearch[FusionSettings]], None] | None = None,
    ):
        self.communicator = communicator
        self.automatic_names: dict[str, itertools.count[int]] = {}
        self._stalls = StallInspector(knobs.stall_s, timeout_s, names)
        self._fusion = FusionSettings(knobs.fusion_bytes, knobs.cycle_s)
        self._tuner = None if tune is None else FusionAutotuner(self._fusion, self._largest, tune)
        self._cache = RequestCache(knobs.cache_capacity)
        self._changed = threading.Condition()  # protects what follows, up to the empty line
        self._waiting: dict[str, OperationHandle] = {}
        self._later: dict[str, deque[OperationHandle]] = {}  # asked for under an automatic name that is still in use
        self._join: OperationHandle | None = None
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._idle = False  # the background thread sleeps until it is told
        self._waiters = 0  # threads that wait for another one that drives

        self._driving = threading.Lock()  # held by the thread that drives, which alone uses what follows
        self._bits = np.zeros(_BITS_FROM + knobs.cache_capacity, np.uint8)
        self._merged = np.empty_like(self._bits)
        self._joined: list[int] = []  # in the order in which they did
        stalls = communicator.runner.stalls
        stalls.stall_s, stalls.on_stall = knobs.stall_s, lambda call, missing: self._warn_of_absent(missing)

    # ------------------------------------------------------------------------------------------------ what callers do

    def submit(self, request: Request, part: FusedPart, *, wake: bool, queue: bool = False) -> OperationHandle:
        """Ask for an operation. The part's arrays belong to it until it is done.

        Args:
            wake: let the background thread see to it; False if the caller waits for it at once.
            queue: if the name is in use, begin when that operation is done; else that is an error.

        Raises: HorovodInternalError if an operation of that name is under way, or collectives have failed before.
        """
        handle = OperationHandle(request, part)
        with self._changed:
            self._check_usable()
            if request.name not in self._waiting:
                self._waiting[request.name] = handle
            elif queue:
                self._later.setdefault(request.name, deque()).append(handle)
            else:
                raise HorovodInternalError(
                    f"{request.name!r} is under way already: an operation of this name was started and has not "
                    f"finished. Give operations that run at the same time different names, or synchronize first."
                )
            if wake:
                self._wake()
        return handle

    def join(self) -> int:
        """Run out of data: count as zeros in the others' reductions until all have; returns who was the last."""
        handle = OperationHandle(Request("join", "join"), FusedPart(()))
        with self._changed:
            self._check_usable()
            if self._join is not None:
                raise HorovodInternalError("this rank has joined already and waits for the others.")
            self._join = handle
        self.wait(handle)
        last: int = handle.part.result
        return last

    def poll(self, handle: OperationHandle) -> bool:
        """Whether an operation is done, well or not; never waits."""
        return handle.done

    def wait(self, handle: OperationHandle) -> None:
        """Return when an operation is done, with its result in `handle.part.result`.

        Raises: HorovodInternalError if it failed.
        """
        while not handle.done:
            if self._driving.acquire(blocking=False):
                try:
                    self._drive(lambda: not handle.done)
                finally:
                    self._release()
            else:
                with self._changed:
                    self._waiters += 1
                    self._changed.wait_for(lambda: handle.done or not self._driving.locked())
                    self._waiters -= 1
        if handle.error is not None:
            raise handle.error

    @property
    def failure(self) -> BaseException | None:
        """Why collectives are not possible any more; None while they are.

        It is kept here, since who catches an error may raise it again without its `__cause__`, as Keras's `fit` does.
        """
        return self._failure

    def close(self, *, because: Exception | None = None) -> None:
        """Stop; what is under way ends with an error. Safe to call twice.

        Args:
            because: the other ranks are told that they must stop as well, in their next collective, and why.
        """
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            self._fail(PhalanxError("Horovod has been shut down."))
        if not self._driving.acquire(blocking=False):
            self.communicator.runner.interrupt()
            self._driving.acquire()
        self._driving.release()
        if self._thread is not None:
            self._thread.join()
        if because is not None:
            self.communicator.runner.give_up(because)
        self.communicator.close()

    # ---------------------------------------------------------------------------------------------- who drives, when

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise HorovodInternalError.of(self._failure)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"phalanx-horovod-{self.communicator.rank}", daemon=True
            )
            self._thread.start()
        elif self._idle:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle = True
                self._changed.wait_for(lambda: self._stopped or (bool(self._waiting) and not self._driving.locked()))
                self._idle = False
                if self._stopped:
                    return
            # The program may be about to ask for more, or to wait and so drive itself.
            time.sleep(self._fusion.cycle_s)
            if self._driving.acquire(blocking=False):
                try:
                    self._drive(lambda: bool(self._waiting) and not self._stopped)
                except PhalanxError:
                    pass  # every handle has it
                finally:
                    self._release()

    def _release(self) -> None:
        """Stop to drive; whoever waits may take over."""
        self._driving.release()
        with self._changed:
            # Waking a thread in vain would cost as much as a small operation.
            if self._waiters or (self._waiting and self._idle):
                self._changed.notify_all()

    def _drive(self, wanted: Callable[[], bool]) -> None:
        while wanted() and self._failure is None:
            try:
                advanced = self._round()
            except BaseException as error:
                with self._changed:
                    self._fail(error)
                if not isinstance(error, Exception):
                    raise
                return
            if not advanced:
                time.sleep(self._fusion.cycle_s)

    # ------------------------------------------------------------------------------------------------------ one round

    def _round(self) -> bool:
        """Take part in one round and do what is ready; whether anything was."""
        rank, cache, bits = self.communicator.rank, self._cache, self._bits
        if timeline.current.marks_cycles:
            timeline.current.instant(timeline.COLLECTIVES, "CYCLE_START")
        with self._changed:
            waiting = list(self._waiting.values())
            joins = self._join is not None
        told = rank in self._joined
        bits[:] = told
        bits[_NEWS] = joins == told and not self._stalls.is_due(waiting)
        items: list[Request | int] = []
        for handle in waiting:
            number = cache.number_of(handle.request)
            if number is None:
                bits[_NEWS] = 0
                items.append(handle.request)
            else:
                bits[_BITS_FROM + number] = 1
                items.append(number)
        try:
            self.communicator.all_reduce([bits], ReduceOp.MIN, out=[self._merged])
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(f"{self._awaited()} did not begin: {error}") from error
        if self._merged[_NEWS]:
            ready = [cache[int(number)] for number in np.flatnonzero(self._merged[_BITS_FROM:])]
            verdicts = [NegotiationResult(request, refusal(request, self._joined)) for request in ready]
        else:
            verdicts = self._hear_all(RankRequests(items, joins, self._stalls.overdue(waiting)))
        self._carry_out(verdicts)
        return bool(verdicts)

    def _hear_all(self, own: RankRequests) -> list[NegotiationResult]:
        encoded = self.communicator.all_gather_bytes(_encode(own))
        statements = [_DECODER.decode(item) for item in encoded]
        self._joined += [rank for rank, each in enumerate(statements) if each.joined and rank not in self._joined]
        if len(self._joined) == self.communicator.world_size:
            self._all_joined()
        waits_for = [self._cache.resolve(each) for each in statements]
        missing = absent(waits_for, self._joined)
        for stall in self._stalls.inspect(self._waiting, missing):
            self._warn(stall.name, stall.ranks, "which ask for other operations")
        self._stalls.end_overdue([each.overdue for each in statements], missing)
        return decide(waits_for, self._joined)

    def _all_joined(self) -> None:
        last, self._joined = self._joined[-1], []
        with self._changed:
            handle, self._join = self._join, None
            assert handle is not None, "this rank has joined, too"
            # Some have called what others have not: from here on all count alike again.
            self.automatic_names.clear()
            handle.part.result = last
            handle.done = True

    def _carry_out(self, verdicts: Sequence[NegotiationResult]) -> None:
        good = [verdict.request for verdict in verdicts if not verdict.error]
        for request in good:
            self._cache.note(request)
        for verdict in verdicts:
            if verdict.error:
                self._finish([verdict.request.name], HorovodInternalError.of(CollectiveMismatchError(verdict.error)))
        for batch in fuse(good, self._fusion.threshold):
            handles = [self._waiting.get(request.name) for request in batch]
            started = timeline.now()
            execute(self.communicator, batch, [None if handle is None else handle.part for handle in handles])
            if timeline.current.on:
                _record(handles, started)
            self._finish([request.name for request in batch])
        if self._tuner is not None and good:
            self._tune(self._tuner, good)

    def _tune(self, tuner: FusionAutotuner, done: Sequence[Request]) -> None:
        """What a round has taken counts for what is used at present; the next one may use something else."""
        tuner.did(sum(request.nbytes for request in done))
        self._fusion = tuner.present
        if tuner.over:
            self._tuner = None

    def _largest(self, numbers: Sequence[float]) -> list[float]:
        (merged,) = self.communicator.all_reduce([np.array(numbers)], ReduceOp.MAX)
        return [float(number) for number in merged]

    def _finish(self, names: Sequence[str], error: HorovodInternalError | None = None) -> None:
        with self._changed:
            for name in names:
                self._stalls.is_over(name)
                handle = self._waiting.pop(name, None)
                if handle is not None:
                    handle.error = error
                    handle.done = True
                if name in self._later:
                    self._waiting[name] = self._later[name].popleft()
                    if not self._later[name]:
                        del self._later[name]
            if self._waiters:
                self._changed.notify_all()

    def _fail(self, cause: BaseException) -> None:
        """Nothing can be done any more: all that wait get an error of their own that tells of the first cause."""
        self._failure = self._failure or cause
        for handle in (
            *self._waiting.values(),
            *(each for queue in self._later.values() for each in queue),
            self._join,
        ):
            if handle is not None:
                handle.error = HorovodInternalError.of(self._failure)
                handle.done = True
        self._waiting.clear()
        self._later.clear()
        self._join = None
        self._changed.notify_all()

    # -------------------------------------------------------------------------------------------------------- stalls

    def _warn_of_absent(self, ranks: Sequence[int]) -> None:
        """A round has waited too long for ranks that wait for nothing."""
        self._warn(self._awaited(), ranks, "which have not asked for it")

    def _awaited(self) -> str:
        """What this rank waits for, for messages."""
        names = list(self._waiting) or ["join"]
        return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

    def _warn(self, names: str, ranks: Sequence[int], what: str) -> None:
        if self.communicator.rank != min(set(range(self.communicator.world_size)) - set(ranks), default=0):
            return  # one rank says it
        _log.warning(
            "stalled for more than %g s: %s waits for %s, %s. The job ends after %g s "
            "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).",
            self._stalls.warn_s,
            names,
            self._stalls.who(ranks),
            what,
            self._stalls.end_s,
        )


def _record(handles: Sequence[OperationHandle | None], started_ns: int) -> None:
    """Note in the timeline how long operations were negotiated about, and how long they took together."""
    ended_ns = timeline.now()
    for handle in handles:
        if handle is not None:
            request, kind = handle.request, handle.request.kind.upper()
            asked_ns = min(int(handle.asked_at * 1e9), started_ns)
            args = {"bytes": request.nbytes, "together with": len(handles) - 1}
            negotiation = timeline.TimelinePart(f"NEGOTIATE_{kind}", started_ns)
            timeline.current.across(request.name, asked_ns, [negotiation, timeline.TimelinePart(kind, ended_ns, args)])


_encode = msgspec.msgpack.Encoder().encode
_DECODER = msgspec.msgpack.Decoder(RankRequests)
