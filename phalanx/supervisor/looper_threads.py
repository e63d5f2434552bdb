"""Threads that repeat a call until a stop is requested, like TensorFlow 1's `Coordinator` and `LooperThread`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

JOIN_S = 0.02
"""Seconds to wait for a stopping thread before serving what it may wait for."""


class LooperThreads:
    """The threads of one supervisor. Thread-safe.

    Only the first error, of a thread or of the caller that requests a stop, is kept; later ones are logged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects everything below
        self._stop = threading.Event()  # of the current session; `clear` replaces it
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def error(self) -> BaseException | None:
        return self._error

    def start(
        self,
        interval_s: float | None,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> threading.Thread:
        """Call `target` in a new thread, immediately and then every `interval_s` seconds (None: without a pause)."""

        stop = self._stop

        def repeat() -> None:
            due = time.monotonic()
            try:
                while not stop.is_set():
                    target(*args, **(kwargs or {}))
                    # By the clock, not after a fixed pause, so that the time of the calls does not add up.
                    due = max(due + (interval_s or 0.0), time.monotonic())
                    stop.wait(due - time.monotonic())
            except Exception as error:
                if stop is self._stop:
                    self.request_stop(error)
                else:
                    logger.error("A thread of a former session ended with an error.", exc_info=error)

        name = getattr(target, "__name__", type(target).__name__)
        thread = threading.Thread(target=repeat, name=f"phalanx-loop-{name}", daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()
        return thread

    def request_stop(self, error: BaseException | None = None) -> None:
        """Make all threads stop after their current call."""
        # Set the error before a thread that waits for the stop can read it.
        with self._lock:
            first = self._error is None
            if error is not None and first:
                self._error = error
        if error is not None and not first and error is not self._error:
            logger.error("A further error while the supervisor stops.", exc_info=error)
        self._stop.set()

    def should_stop(self) -> bool:
        return self._stop.is_set()

    def wait_for_stop(self, timeout_s: float | None = None) -> bool:
        """Wait until a stop is requested, for at most `timeout_s` seconds; return whether it is."""
        return self._stop.wait(timeout_s)

    def clear(self) -> None:
        """Discard an earlier stop, its error and its threads, so that new threads can be started. Threads that did not
        stop in time stop after their current call."""
        with self._lock:
            if self._stop.is_set():  # otherwise the threads belong to the session that begins
                self._threads, self._error, self._stop = [], None, threading.Event()

    def join(self, grace_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for the threads to stop, repeatedly calling `meanwhile` to serve what they wait for.

        Raises: RuntimeError naming those that still run after `grace_s` seconds; they are daemons and die with the
            process.
        """
        until = time.monotonic() + grace_s
        # In short waits: a thread may itself wait for the caller, to save at a step boundary, which `meanwhile` serves.
        for thread in self._threads:
            while thread.is_alive() and thread is not threading.current_thread() and time.monotonic() < until:
                meanwhile()
                thread.join(JOIN_S)
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            raise RuntimeError(
                f"{', '.join(late)} did not stop within {grace_s:g} s. Its function should look at `should_stop()`, or "
                f"wait for less long; `stop_grace_secs` sets the time."
            )
