"""Asynchronous collectives: one background thread per communicator, started when it is first needed.

All ranks must call collectives in the same order. There is therefore one queue, and a blocking call waits until the
queue is empty before it runs in the caller's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from phalanx.errors import CollectiveTimeoutError, PhalanxError


class PendingHandle:
    """The result of a submitted collective; see `communicator.Handle`.

    Args:
        name: Name of the submitted function, for messages.
    """

    def __init__(self, name: str):
        self.name = name
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """See `Handle.done`."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> Any:
        """See `Handle.wait`."""
        if not self._finished.wait(timeout_s):
            raise CollectiveTimeoutError(
                f"{self.name} has not finished within {timeout_s:g} s. It continues in the background."
            )
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the result, or the error that `wait` raises."""
        self._result, self._error = result, error
        self._finished.set()


class CollectiveThread:
    """A thread that runs submitted functions in order.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str):
        self._queue: queue.SimpleQueue[tuple[PendingHandle, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # protects `_pending` and `_is_stopped`
        self._pending = 0
        self._is_stopped = False
        # A daemon thread, so that a program that does not close the communicator can exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, name: str, body: Callable[[], Any]) -> PendingHandle:
        """Run `body` after everything submitted before. Raises PhalanxError after `stop`."""
        handle = PendingHandle(name)
        with self._changed:
            if self._is_stopped:
                raise PhalanxError(f"{name}: the communicator is closed.")
            self._pending += 1
            self._queue.put((handle, body))  # under the lock: anything after the None of `stop` would never finish
        return handle

    def drain(self) -> None:
        """Wait until everything submitted has finished or failed. Returns at once if called by this thread itself."""
        if self._thread is threading.current_thread():
            return
        with self._changed:  # each function is a collective, which has a deadline
            self._changed.wait_for(lambda: self._pending == 0)

    def stop(self, timeout_s: float) -> bool:
        """Make functions that have not started fail, and return whether the thread ended in time."""
        with self._changed:
            if not self._is_stopped:
                self._is_stopped = True
                self._queue.put(None)
        if self._thread is threading.current_thread():
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            handle, body = item
            try:
                if self._is_stopped:
                    raise PhalanxError(f"{handle.name}: the communicator was closed before this began.")
                handle.finish(body())
            except BaseException as error:  # for the caller of `wait`
                handle.finish(error=error)
            # The caller's arrays must not stay alive in this frame until the next item.
            del item, handle, body
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
