"""Requests of other threads, which the training thread executes at its next step boundary."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any


class BoundaryRequests:
    """A queue of functions, each run by the training thread between two steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the next two attributes; not held while a function runs
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed = False  # if set, `_waiting` stays empty
        self._interrupted: list[Future[Any]] = []  # of interrupted functions; used by the training thread only

    def call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Have the training thread call `function`, and wait for its result.

        Raises: what the function raises; RuntimeError if the session is over; TimeoutError if no step ends in time.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("The managed session is over: nothing can be saved any more.")
            self._waiting.append((future, function))
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise RuntimeError("The managed session ended before it reached a step boundary.") from None
        except TimeoutError:
            if future.cancel():
                raise TimeoutError(
                    f"No step ended within {timeout_s:g} s (PHALANX_TIMEOUT), so nothing could be saved. In a custom "
                    f"training loop, call should_stop() once for each step."
                ) from None
            return future.result()  # already running

    def serve(self) -> None:
        """Run the waiting functions. Called in the training thread, between two steps."""
        # Checked without the lock at every step. Only this thread removes requests, here and in `close`.
        while self._waiting:
            with self._lock:
                future, function = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():  # its caller timed out
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            except BaseException:  # Ctrl-C ends the session; `close` ends the caller's wait
                self._interrupted.append(future)
                raise

    def close(self) -> None:
        """Refuse further requests, and make waiting ones raise an error. Safe to call twice."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:  # none is running: this is the thread that would run it
            future.cancel()
        while self._interrupted:
            self._interrupted.pop().set_exception(RuntimeError("The managed session was interrupted meanwhile."))
