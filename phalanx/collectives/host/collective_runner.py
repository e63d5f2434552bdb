"""Runs the collectives of one communicator: one at a time, in order, until one fails or the communicator is closed."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from phalanx.collectives.host.algorithm import CollectiveAlgorithm
from phalanx.collectives.host.channel import PacketKind
from phalanx.collectives.host.collective_thread import CollectiveThread, PendingHandle
from phalanx.collectives.host.mesh import FLUSH_S, POLL_S, Mesh
from phalanx.collectives.operation import CollectiveCall, Operation, prepare
from phalanx.errors import PhalanxError, UnsupportedError
from phalanx.monitoring import timeline
from phalanx.transport.link import DELIVERY_TIMEOUT_S

_log = logging.getLogger(__name__)

T = TypeVar("T")


class CollectiveRunner:
    """Controls the order, deadlines and failure of a communicator's collectives.

    After an error, every later collective raises the same error.

    Args:
        timeout_s: Maximum duration of a collective.

    Attributes:
        algorithm: Algorithm that moves the values. May be replaced between two collectives, at the same point on all
            ranks.
        mesh: Channels to the other ranks.
        stalls: Watch that acts if a collective waits for a long time.
        started: Number of collectives that this rank has started.
    """

    def __init__(self, mesh: Mesh, algorithm: CollectiveAlgorithm, timeout_s: float):
        self.algorithm = algorithm
        self.mesh = mesh
        self.stalls = mesh.stalls
        self.started = 0
        self._timeout_s = timeout_s
        self._turn = threading.Lock()  # held while a collective runs: one at a time
        self._waited_s = 0.0
        self._running_since: float | None = None  # by `time.monotonic`; None between collectives
        self._thread: CollectiveThread | None = None  # from the first `submit` on
        self._failure: BaseException | None = None
        self._is_closed = False
        if mesh.membership.links:
            _runners.add(self)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in collectives, including the running one. May be read from any thread."""
        since = self._running_since  # read only once: the thread that runs the collective resets it
        return self._waited_s + (0.0 if since is None else time.monotonic() - since)

    def run(self, operation: Operation, body: Callable[[CollectiveCall], T], nbytes: int = 0) -> T:
        """Run a collective after all that were submitted before it.

        Args:
            operation: Operation of the call; all ranks must call the same.
            body: Function that moves the values.
            nbytes: Number of bytes that this rank contributes, if not given by `operation`.
        """
        if self._thread is not None:
            self._thread.drain()  # before `_turn` is taken, which the thread needs
        with self._turn:
            self.check_usable()
            call = self._begin(operation)
            self._running_since = call.started
            try:
                # Infinities and NaN are valid values here: overflow is detected when gradients are unscaled.
                with np.errstate(all="ignore"):
                    return self._recorded(call, body, nbytes) if timeline.current.on else body(call)
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._running_since = None
                self._waited_s += time.monotonic() - call.started

    def submit(self, name: str, body: Callable[[], Any]) -> PendingHandle:
        """Run a function in the background, in order with the collectives."""
        self.check_usable()
        if self._thread is None:
            self._thread = CollectiveThread(f"phalanx-collectives-{self.mesh.membership.rank}")
        return self._thread.submit(name, body)

    def check_usable(self) -> None:
        """Raise the error that ended this communicator, if there was one."""
        if self._is_closed:
            raise PhalanxError(f"the communicator of rank {self.mesh.membership.rank} is closed; connect again.")
        if self._failure is not None:
            # The same object, so that later callers see the cause, and the exit code reflects it.
            raise self._failure

    def interrupt(self) -> None:
        """Make a collective that waits in another thread fail with a PhalanxError, and notify the other ranks."""
        self.mesh.is_interrupted = True

    def give_up(self, error: BaseException) -> None:
        """Fail with this error, and notify the others: in the next collective, not in one that they may still
        finish."""
        if self._failure is None and not self._is_closed:
            with self._turn:
                # With the next number: peers that are one behind ignore the ABORT until they have finished theirs.
                self._begin(prepare("barrier"))
                self._fail(error)

    def close(self) -> None:
        """Cancel a collective that runs in the background, and free the algorithm's resources. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread is not None:
            self.interrupt()
            if not self._thread.stop(timeout_s=10 * POLL_S + FLUSH_S):
                rank = self.mesh.membership.rank
                _log.warning("rank %d: a collective is still running; its memory is not freed.", rank)
                return
        if self._failure is None:  # after a failure, the peers have received an ABORT or descriptions instead
            self.mesh.send_all(PacketKind.LEAVE, b"", DELIVERY_TIMEOUT_S)
        self.algorithm.close()

    def leave_to_parent(self) -> None:
        """Refuse every collective in a fork of the process that owns this communicator."""
        self._turn = threading.Lock()  # another thread may have held it
        self._thread = None  # a fork has none of the parent's threads
        me = self.mesh.membership.local_member
        self._failure = self._failure or UnsupportedError(
            f"pid {os.getpid()}, a fork of {me.task} (rank {me.rank}, pid {me.pid}) such as a worker of a DataLoader, "
            f"is no member of the job. Call what needs the other replicas in the process that created the strategy."
        )

    def _begin(self, operation: Operation) -> CollectiveCall:
        self.started += 1
        now = time.monotonic()
        call = CollectiveCall(self.started, operation, now, now + self._timeout_s)
        self.mesh.begin(call)
        return call

    def _recorded(self, call: CollectiveCall, body: Callable[[CollectiveCall], T], nbytes: int) -> T:
        """Run a collective and record it in the timeline."""
        operation, mesh, started = call.operation, self.mesh, timeline.now()
        sent = mesh.bytes_sent + mesh.bytes_shared
        try:
            return body(call)
        finally:
            args = {
                "bytes": nbytes or operation.nbytes,
                "sent": mesh.bytes_sent + mesh.bytes_shared - sent,
                "algorithm": self.algorithm.name,
                "arrays": len(operation.description.arrays),
                "detail": operation.description.detail,
                "number": call.number,
            }
            timeline.current.complete(mesh.track, operation.description.name, started, args)

    def _fail(self, error: BaseException) -> None:
        """Fail this communicator, so that no rank considers the running collective complete."""
        self._failure = error
        self.algorithm.fail()
        self.mesh.abort(error)
        _log.debug("rank %d: %s", self.mesh.membership.rank, error)


_runners: weakref.WeakSet[CollectiveRunner] = weakref.WeakSet()  # all runners with other ranks


def _leave_to_parent() -> None:
    """In a forked child: disable its runners. The child shares the memory in which the ranks synchronize, and its
    actions there would count as its parent's."""
    for runner in list(_runners):
        runner.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
