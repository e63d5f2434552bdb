"""Measuring the line between two tasks: round-trip time, clock offset, bandwidth. For `phalanx doctor`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from phalanx.cluster.compatibility import TaskDescription
from phalanx.cluster.software_versions import SoftwareVersions
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

EXAMINE = "doctor"
"""Purpose of a connection over which a task is asked for its versions and the line is measured."""

PINGS, PINGS_S = 32, 2.0
"""So many, or as many as fit into the time."""
BULKS = ((1 << 16, 1.5), (1 << 20, 0.5), (32 << 20, 0.0))
"""Bytes of each transfer, and how long it may take for the next, larger one to be made."""
STEP_TIMEOUT_S = 30.0
"""For one ping or one transfer: 64 KiB over a line of 200 ms that loses 5 % of all packets take 5 s."""
PATIENCE_S = 60.0
"""How long the measuring of one line may take, by whoever measures many."""


class LinkBenchmarkAnswer(msgspec.Struct, frozen=True):
    """What a task says when it is examined; details of the Welcome."""

    description: TaskDescription
    software: SoftwareVersions


class _Ping(msgspec.Struct, frozen=True, tag="ping"):
    """A frame that is answered by a `_Pong`, after all of its payload is here."""


class _Pong(msgspec.Struct, frozen=True):
    """The clock of the other end when it answered, in seconds since 1970."""

    clock_s: float


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """The line to another task.

    Attributes:
        round_trip_s: of the fastest of several small messages.
        clock_offset_s: how far its clock is ahead of ours, uncertain by half the round trip.
        bytes_per_s: of one large message from here to there.
    """

    round_trip_s: float
    clock_offset_s: float
    bytes_per_s: float


class LinkBenchmarkService:
    """The service: answers pings, each link in a thread of its own, as they come one at a time.

    Args:
        tasks: how many there are. A link is quiet while its owner measures its lines to the others.
    """

    def __init__(self, answer: LinkBenchmarkAnswer, tasks: int):
        self._answer = answer
        self._patience_s = PATIENCE_S * tasks
        self._changed = threading.Condition()  # protects what follows
        self._examined_by = 0  # links that are open
        self._finished: set[str] = set()

    def admit(self, hello: Hello) -> Welcome:
        del hello
        return Welcome(details=msgspec.msgpack.encode(self._answer))

    def adopt(self, hello: Hello, link: Link) -> None:
        with self._changed:
            self._examined_by += 1
        threading.Thread(
            target=self._serve, args=(hello, link), name=f"phalanx-examine-{hello.task}", daemon=True
        ).start()

    def wait_for(self, tasks: set[str], timeout_s: float) -> None:
        """Wait until these tasks have measured their line to this one, and no other does. Those that have not begun
        when the time is up are not waited for."""
        with self._changed:
            self._changed.wait_for(lambda: tasks <= self._finished and not self._examined_by, timeout=timeout_s)
            self._changed.wait_for(lambda: not self._examined_by, timeout=self._patience_s)

    def _serve(self, hello: Hello, link: Link) -> None:
        try:
            while True:
                link.receive(deadline=time.monotonic() + self._patience_s)
                pong = msgspec.msgpack.encode(_Pong(time.time()))
                link.send(pong, deadline=time.monotonic() + STEP_TIMEOUT_S)
        except (LinkClosedError, LinkTimeoutError, FrameError) as error:
            logger.debug("examination by %s is over: %s", hello.task, error)  # It hangs up when it has what it wants.
        finally:
            link.close()
            with self._changed:
                self._examined_by -= 1
                self._finished.add(hello.task)
                self._changed.notify_all()


def fastest(ping: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Of some pings, which return a round trip and a clock offset, the one with the shortest round trip: no scheduler
    got in its way."""
    until = time.monotonic() + PINGS_S
    found = [ping()]
    while len(found) < PINGS and time.monotonic() < until:
        found.append(ping())
    return min(found)


def measure(link: Link) -> LinkMeasurement:
    """Measure the line to the other end, which serves `LinkBenchmarkService`.

    Raises: LinkClosedError or LinkTimeoutError if it goes away meanwhile.
    """
    round_trip_s, clock_offset_s = fastest(lambda: _exchange(link, b""))
    seconds = 0.0
    for size, slow_s in BULKS:
        taken_s, _ = _exchange(link, bytes(size))
        seconds = max(taken_s - round_trip_s, 1e-9)
        if seconds > slow_s:
            break
    return LinkMeasurement(round_trip_s, clock_offset_s, size / seconds)


def _exchange(link: Link, payload: bytes) -> tuple[float, float]:
    """Seconds until the answer came, and by how much the other clock is ahead (Cristian 1989)."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    clock_before, before = time.time(), time.monotonic()
    link.send(msgspec.msgpack.encode(_Ping()), [payload] if payload else [], deadline=deadline)
    header, _ = link.receive(deadline=deadline)
    taken_s = time.monotonic() - before
    pong = msgspec.msgpack.decode(header, type=_Pong)
    return taken_s, pong.clock_s - (clock_before + taken_s / 2)
