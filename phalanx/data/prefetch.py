"""Reading ahead: a source that computes in Python runs in a thread while the step runs in another."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

DEPTH = 2
"""Batches read ahead: one is being prepared while another waits. More would only hold memory."""

_POLL_S = 0.1
"""How often a producer that waits for room checks whether to stop."""


class _End:
    """The source is exhausted, or raised `error`."""

    def __init__(self, error: BaseException | None = None):
        self.error = error


class Prefetch(Generic[T]):
    """An iterator over `source` whose items are produced in a separate thread, at most `depth` ahead.

    Errors of the source are raised here, with their traceback. The thread starts with the first item and ends with the
    source, with `close()`, or when this object is collected. `close()` waits for the item that the source is producing,
    up to `close_timeout_s`.
    """

    def __init__(self, source: Iterator[T], depth: int = DEPTH, *, close_timeout_s: float = 5.0):
        self._source = source
        self._items: queue.Queue[Any] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._close_timeout_s = close_timeout_s
        self._ended = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        if self._thread is None:
            # The thread must not hold this object, or it would never be collected.
            self._thread = threading.Thread(
                target=_produce,
                args=(self._source, self._items.put, self._stopped),
                name="phalanx-input",
                daemon=True,
            )
            self._thread.start()
        item = self._items.get()
        if isinstance(item, _End):
            self._ended = True
            self._thread.join()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop reading; safe to call twice, and from any thread."""
        self._ended = True
        self._stopped.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with contextlib.suppress(queue.Empty):  # make room, so that a waiting producer sees the event
                while True:
                    self._items.get_nowait()
            thread.join(self._close_timeout_s)

    def __del__(self) -> None:
        self._stopped.set()


def _produce(source: Iterator[Any], put: Callable[..., None], stopped: threading.Event) -> None:
    def deliver(item: Any) -> bool:
        while not stopped.is_set():
            try:
                put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    end = _End()
    try:
        for item in source:
            if not deliver(item):
                break
    except BaseException as error:  # it belongs to the consumer, whatever it is
        end = _End(error)
    finally:
        close = getattr(source, "close", None)
        if stopped.is_set() and close is not None:
            close()
    deliver(end)
