"""Measuring the line between two tasks: round-trip time, clock offset, bandwidth. For `phalanx doctor`."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import msgspec

from phalanx.cluster.agreement import Statement
from phalanx.cluster.software import Software
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

EXAMINE = "doctor"
"""Purpose of a connection over which a task is asked for its versions and the line is measured."""

PINGS = 32
"""The fastest counts: it is the one that no scheduler got in the way of."""
FIRST_BULK_BYTES = 1 << 20
BULK_BYTES = 32 << 20
"""The second, larger transfer is made only over a line that took less than `SLOW_S` for the first."""
SLOW_S = 0.5
STEP_TIMEOUT_S = 30.0
"""For one ping or one transfer: 1 MiB over 1 Mbit/s takes 9 s."""


class Answer(msgspec.Struct, frozen=True):
    """What a task says when it is examined; details of the Welcome."""

    statement: Statement
    software: Software


class _Ping(msgspec.Struct, frozen=True, tag="ping"):
    """A frame that is answered by a `_Pong`, after all of its payload is here."""


class _Pong(msgspec.Struct, frozen=True):
    """The clock of the other end when it answered, in seconds since 1970."""

    clock_s: float


@dataclass(frozen=True, slots=True)
class Line:
    """The line to another task.

    Attributes:
        round_trip_s: of the fastest of several small messages.
        clock_offset_s: how far its clock is ahead of ours, uncertain by half the round trip.
        bytes_per_s: of one large message from here to there.
    """

    round_trip_s: float
    clock_offset_s: float
    bytes_per_s: float


class Examination:
    """The service: answers pings, each link in a thread of its own, as they come one at a time."""

    def __init__(self, answer: Answer):
        self._answer = answer
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
        """Wait until these tasks have measured their line to this one, and no other does, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: tasks <= self._finished and not self._examined_by, timeout=timeout_s)

    def _serve(self, hello: Hello, link: Link) -> None:
        try:
            while True:
                link.receive(deadline=time.monotonic() + STEP_TIMEOUT_S)
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


def measure(link: Link) -> Line:
    """Measure the line to the other end, which serves `Examination`.

    Raises: LinkClosedError or LinkTimeoutError if it goes away meanwhile.
    """
    round_trip_s, clock_offset_s = min(_exchange(link, b"") for _ in range(PINGS))
    seconds = 0.0
    for size in (FIRST_BULK_BYTES, BULK_BYTES):
        taken_s, _ = _exchange(link, bytes(size))
        seconds = max(taken_s - round_trip_s, 1e-9)
        if seconds > SLOW_S:
            break
    return Line(round_trip_s, clock_offset_s, size / seconds)


def _exchange(link: Link, payload: bytes) -> tuple[float, float]:
    """Seconds until the answer came, and by how much the other clock is ahead (Cristian 1989)."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    clock_before, before = time.time(), time.monotonic()
    link.send(msgspec.msgpack.encode(_Ping()), [payload] if payload else [], deadline=deadline)
    header, _ = link.receive(deadline=deadline)
    taken_s = time.monotonic() - before
    pong = msgspec.msgpack.decode(header, type=_Pong)
    return taken_s, pong.clock_s - (clock_before + taken_s / 2)
