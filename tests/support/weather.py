"""Bad networks: a cable whose frames are late, lost, or wait in a line. What `tc netem` does, for kernels without it.

    python -m tests.support.weather DELAY_MS JITTER_MS LOSS MBITS FD:FD...

carries frames between the two ends of each cable, which are file descriptors of TAP devices, until it is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 65_536
LINE_S = 1.0
"""Frames that would wait longer than this for a full cable are lost."""


@dataclass(frozen=True)
class Weather:
    """What a frame meets on its way through one cable, each way.

    Attributes:
        delay_ms, jitter_ms: how late it is, and by how much more at most, by chance; frames keep their order.
        loss: the share of frames that never arrive.
        mbits: how much the cable carries in a second; 0 for no limit.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    mbits: float = 0.0

    def __str__(self) -> str:
        return f"{self.delay_ms:g} ms + {self.jitter_ms:g} ms, {self.loss:.0%} lost, {self.mbits or 'any'} Mbit/s"


def tap(name: str) -> int:
    """Make a TAP device of this name, as long as the file descriptor is open."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def carry(weather: Weather, cables: list[tuple[int, int]]) -> subprocess.Popen[bytes]:
    """Start the process that is the weather; it takes the file descriptors over."""
    numbers = [weather.delay_ms, weather.jitter_ms, weather.loss, weather.mbits]
    descriptors = [descriptor for cable in cables for descriptor in cable]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, numbers), *(f"{one}:{other}" for one, other in cables)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
    )
    for descriptor in descriptors:
        os.close(descriptor)
    return process


class Way:
    """One direction of a cable."""

    def __init__(self, weather: Weather, to: int, chance: random.Random):
        self._weather, self.to, self._chance = weather, to, chance
        self._free_at = self._last_at = 0.0

    def arrival(self, size: int, now: float) -> float | None:
        """When a frame arrives; None if it does not."""
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


def main(delay_ms: float, jitter_ms: float, loss: float, mbits: float, cables: list[tuple[int, int]]) -> None:
    weather, chance = Weather(delay_ms, jitter_ms, loss, mbits), random.Random(1)
    selector = selectors.DefaultSelector()
    for one, other in cables:
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
    with contextlib.suppress(OSError):  # a cable that is down, or a full queue, loses frames
        os.write(descriptor, frame)


if __name__ == "__main__":
    ends = [tuple(map(int, cable.split(":"))) for cable in sys.argv[5:]]
    main(*map(float, sys.argv[1:5]), ends)  # type: ignore[arg-type]
