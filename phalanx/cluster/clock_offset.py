"""Measures how far the clock at the other end of a link is ahead of this process's clock (Cristian 1989)."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from phalanx.transport.decoding import decode_message
from phalanx.transport.link import Link

PINGS, PINGS_S = 32, 2.0
"""Number of pings, and the time limit in seconds, after which fewer are enough."""

Clock = Callable[[], int]
"""Function that returns the time in ns since 1970."""


class ClockRequest(msgspec.Struct, frozen=True, tag="ping"):
    """A request for a `_ClockReading`. The other end sends it after the whole payload has arrived."""


class _ClockReading(msgspec.Struct, frozen=True):
    """The other end's clock when it answered, in ns since 1970."""

    clock_ns: int


_PING = msgspec.msgpack.encode(ClockRequest())


def answer_ping(link: Link, clock: Clock, *, timeout_s: float) -> None:
    """Answer a received `ClockRequest`."""
    link.send(msgspec.msgpack.encode(_ClockReading(clock())), deadline=time.monotonic() + timeout_s)


def exchange_ping(link: Link, clock: Clock, *, timeout_s: float, payload: bytes = b"") -> tuple[float, float]:
    """Ping the other end.

    Returns: the ns until the answer arrived, and the lead of the other clock in ns.
    """
    deadline = time.monotonic() + timeout_s
    clock_before, before = clock(), time.monotonic_ns()
    link.send(_PING, [payload] if payload else [], deadline=deadline)
    header, _ = link.receive(deadline=deadline)
    taken = time.monotonic_ns() - before
    return taken, decode_message(header, _ClockReading).clock_ns - (clock_before + taken / 2)


def fastest_ping(link: Link, clock: Clock, *, timeout_s: float) -> tuple[float, float]:
    """Return the `exchange_ping` with the shortest round trip, which schedulers disturbed least. The uncertainty of its
    offset is half the round trip."""
    until = time.monotonic() + PINGS_S
    found = [exchange_ping(link, clock, timeout_s=timeout_s)]
    while len(found) < PINGS and time.monotonic() < until:
        found.append(exchange_ping(link, clock, timeout_s=timeout_s))
    return min(found)
