"""A slow network, simulated: a bound on the bytes that a process sends in a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

BURST_S = 0.01
"""Bytes of so many seconds may go at once after a pause: long enough that waiting is not felt as steps of its own."""


class Throttle:
    """A token bucket.

    Args:
        bytes_per_s: what may be sent.
        clock: seconds, ever growing.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic):
        self._rate = bytes_per_s
        self._clock = clock
        self._largest = max(1.0, bytes_per_s * BURST_S)
        self._tokens = self._largest
        self._filled = clock()

    def available(self) -> int:
        """Bytes that may be sent now."""
        now = self._clock()
        self._tokens = min(self._largest, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        return int(self._tokens)

    def spend(self, count: int) -> None:
        """So many have been sent."""
        self._tokens -= count

    def wait_s(self) -> float:
        """Seconds until half the bucket is full: what is worth being woken for."""
        return max(0.0, (self._largest / 2 - self.available()) / self._rate)


def first_bytes(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """The first `count` bytes of byte views laid end to end, as views."""
    found: list[memoryview] = []
    for piece in pieces:
        if count <= 0:
            break
        found.append(piece[:count] if piece.nbytes > count else piece)
        count -= piece.nbytes
    return found
