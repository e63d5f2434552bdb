"""Bad networks: cables that delay, lose or queue frames. Does what `tc netem` does, for kernels without it.

    python -m tests.support.weather DELAY_MS JITTER_MS LOSS MBITS FD FD ...

carries frames between the two ends of each cable (file descriptors of TAP devices) until it is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from tests.support.commands import ROOT, die_with_parent

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 65_536
LINE_S = 1.0
"""Maximum queueing time. Frames that would wait longer for a full cable are lost."""


@dataclass(frozen=True)
class Weather:
    """Conditions on a cable, in each direction.

    Attributes:
        delay_ms, jitter_ms: Delay of a frame, and the maximum random addition. Frames keep their order.
        loss: Fraction of frames that are lost.
        mbits: Rate of the cable in megabits per second; 0 for no limit.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    mbits: float = 0.0


def tap(name: str) -> int:
    """Create a TAP device with this name. It exists as long as the file descriptor is open."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def carry(weather: Weather, cables: Sequence[tuple[str, str]]) -> subprocess.Popen[bytes]:
    """Create cables between TAP devices with these names, and start the process that owns and simulates them."""
    with contextlib.ExitStack() as stack:
        ends = []
        for name in itertools.chain.from_iterable(cables):
            ends.append(tap(name))
            stack.callback(os.close, ends[-1])
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, [*astuple(weather), *ends])],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=ends,
            preexec_fn=die_with_parent,
        )


class Way:
    """One direction of a cable."""

    def __init__(self, weather: Weather, to: int, chance: random.Random):
        self._weather, self.to, self._chance = weather, to, chance
        self._free_at = self._last_at = 0.0

    def arrival(self, size: int, now: float) -> float | None:
        """Return when a frame arrives; None if it is lost."""
        weather = self._weather
        if self._chance.random() < weather.loss:
            return None
        if weather.mbits:
            if self._free_at - now > LINE_S:
                return None
            self._free_at = max(self._free_at, now) + size * 8 / (weather.mbits * 1e6)
        late_s = (weather.delay_ms + self._chance.random() * weather.jitter_ms) / 1e3
        self._last_at = max(self._last_at, max(self._free_at, now) + late_s)
        return self._last_at


def main(weather: Weather, ends: Sequence[int]) -> None:
    chance = random.Random(1)
    selector = selectors.DefaultSelector()
    for one, other in zip(ends[::2], ends[1::2], strict=True):
        selector.register(one, selectors.EVENT_READ, Way(weather, other, chance))
        selector.register(other, selectors.EVENT_READ, Way(weather, one, chance))
    on_their_way: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait_s = max(0.0, on_their_way[0][0] - time.monotonic()) if on_their_way else None
        ready = selector.select(wait_s)
        now = time.monotonic()
        for key, _ in ready:
            way: Way = key.data
            while (frame := _read(key.fd)) is not None:
                if (at := way.arrival(len(frame), now)) is not None:
                    count += 1
                    heapq.heappush(on_their_way, (at, count, way.to, frame))
        while on_their_way and on_their_way[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(on_their_way)
            _write(to, frame)


def _read(descriptor: int) -> bytes | None:
    try:
        return os.read(descriptor, FRAME_BYTES)
    except BlockingIOError:
        return None


def _write(descriptor: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a cable that is down or a full queue loses frames
        os.write(descriptor, frame)


if __name__ == "__main__":
    main(Weather(*map(float, sys.argv[1:5])), [int(descriptor) for descriptor in sys.argv[5:]])
