"""Simulates a slow network: limits the bytes that a process sends per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

BURST_S = 0.01
"""Seconds of bytes that may be sent at once after a pause: long enough to make waits rare."""


class Throttle:
    """A token bucket.

    Args:
        bytes_per_s: Maximum rate.
        clock: Function that returns monotonic seconds.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic):
        self._rate = bytes_per_s
        self._clock = clock
        self._largest = max(1.0, bytes_per_s * BURST_S)
        self._tokens = self._largest
        self._filled = clock()

    def available(self, wanted: int) -> int:
        """Number of `wanted` bytes that may be sent now: at least half a bucket or all of them, or none."""
        now = self._clock()
        self._tokens = min(self._largest, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        return min(wanted, int(self._tokens)) if self._tokens >= self._minimum(wanted) else 0

    def spend(self, count: int) -> None:
        """Account for `count` bytes that were sent."""
        self._tokens -= count

    def wait_s(self, wanted: int) -> float:
        """Seconds until some of `wanted` bytes are `available`."""
        return 0.0 if self.available(wanted) else max(0.0, (self._minimum(wanted) - self._tokens) / self._rate)

    def _minimum(self, wanted: int) -> float:
        return min(wanted, self._largest / 2)


def first_bytes(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """The first `count` bytes of concatenated byte views, as views."""
    found: list[memoryview] = []
    for piece in pieces:
        if count <= 0:
            break
        found.append(piece[:count] if piece.nbytes > count else piece)
        count -= piece.nbytes
    return found
