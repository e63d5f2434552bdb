"""Accounts for the time of a process and the bytes that it sends, over all jobs that it joins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Traffic(NamedTuple):
    """Totals of what one process has sent and waited for.

    Attributes:
        bytes_sent: Bytes sent to the others, through shared memory or links.
        bytes_on_links: The part of `bytes_sent` that went over links, including packet headers.
        waited_s: Seconds spent in collectives, including a running one, or waiting for servers.
        collectives: Number of collectives that this rank has started.
    """

    bytes_sent: int = 0
    bytes_on_links: int = 0
    waited_s: float = 0.0
    collectives: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """The sum of both."""
        return Traffic._make(map(sum, zip(self, other, strict=True)))


class TrafficAccount:
    """Accumulates traffic over jobs, since a process may join another job, whose traffic begins at 0.

    Attributes:
        computed_s, waited_s, bytes_sent, bytes_on_links: See `WorkerFigures`; up to the last `update`.
    """

    def __init__(self) -> None:
        self.computed_s = self.waited_s = 0.0
        self.bytes_sent = self.bytes_on_links = 0
        self._read: Callable[[], Traffic] | None = None
        self._last_at = time.monotonic()
        self._last: Traffic | None = None

    def start(self) -> None:
        """Start counting time, as computing or waiting."""
        self._last_at = time.monotonic()

    def watch(self, read: Callable[[], Traffic] | None) -> None:
        """Set the function that returns the traffic of the current job; None if the process has left its job."""
        self._last = None
        self._read = read

    def update(self) -> None:
        """Add the traffic and the time since the last call. Called by one thread at a time."""
        read = self._read  # read once, because the main thread may leave the job at any time
        now, traffic = time.monotonic(), None if read is None else read()
        passed_s, self._last_at = now - self._last_at, now
        before, self._last = self._last or Traffic(), traffic
        if traffic is None:
            self.computed_s += passed_s
            return
        # Collectives in the background count twice, and one that is just ending may be missed once.
        waited_s = min(max(0.0, traffic.waited_s - before.waited_s), passed_s)
        self.waited_s += waited_s
        self.computed_s += passed_s - waited_s
        self.bytes_sent += max(0, traffic.bytes_sent - before.bytes_sent)
        self.bytes_on_links += max(0, traffic.bytes_on_links - before.bytes_on_links)
