"""The threads of a shard group, which `close` waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

JOIN_TIMEOUT_S = 5.0
"""Seconds that threads may take to end once their links are closed: longer than any update takes."""


class ServiceThreads:
    """Threads that end when the group closes their links. A thread still in the backend at interpreter exit crashes."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self._lock = threading.Lock()  # protects the list
        self._threads: list[threading.Thread] = []

    def start(self, name: str, body: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=body, args=args, name=f"phalanx-{name}", daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def join(self) -> None:
        """Wait for the threads, for at most `JOIN_TIMEOUT_S`."""
        until = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
