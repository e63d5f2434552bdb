"""Asynchronous collectives: one worker thread for each communicator, started when it is first needed.

All ranks must call collectives in the same order. So there is one queue, and a blocking call waits until the
queue is empty; it then runs in the caller's own thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from phalanx.errors import CollectiveTimeoutError, PhalanxError


class PendingHandle:
    """The result of a submitted collective; see `communicator.Handle`."""

    def __init__(self, name: str):
        self._name = name
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> Any:
        """The collective's result, or its error.

        Raises: CollectiveTimeoutError if it is not done in time; it goes on, and may be waited for again.
        """
        if not self._finished.wait(timeout_s):
            raise CollectiveTimeoutError(
                f"{self._name} has not finished within {timeout_s:g} s. It goes on in the background."
            )
        if self._error is not None:
            raise self._error
        return self._result

    def _finish(self, result: Any = None, error: BaseException | None = None) -> None:
        self._result, self._error = result, error
        self._finished.set()


class CollectiveThread:
    """A thread that runs what is submitted, in order. The first error ends all that follows with the same
    error.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self._queue: queue.SimpleQueue[tuple[PendingHandle, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # Protects `_pending` and `_stopped`.
        self._pending = 0
        self._stopped = False
        # A daemon, so that a program that forgets to close can end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, name: str, body: Callable[[], Any]) -> PendingHandle:
        handle = PendingHandle(name)
        with self._changed:
            if self._stopped:
                raise PhalanxError(f"{name}: the communicator is closed.")
            self._pending += 1
            self._queue.put((handle, body))
        return handle

    def drain(self) -> None:
        """Return when all that was submitted has finished, well or not. At once for what this thread itself runs."""
        if self._thread is threading.current_thread():
            return
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0)

    def stop(self, timeout_s: float) -> bool:
        """Finish nothing more; what was not begun ends with an error. Whether the thread ended in time."""
        with self._changed:
            if not self._stopped:
                self._stopped = True
                self._queue.put(None)
        if self._thread is threading.current_thread():
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            handle, body = item
            try:
                if self._stopped:
                    raise PhalanxError(f"{handle._name}: the communicator was closed before this began.")
                handle._finish(body())
            except BaseException as error:  # Belongs to whoever waits for the handle.
                handle._finish(error=error)
            # The caller's arrays must not live on in this frame until the next item.
            del item, handle, body
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
