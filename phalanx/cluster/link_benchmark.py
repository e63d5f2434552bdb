"""Measures the link between two tasks for `phalanx doctor`: round-trip time, clock offset, bandwidth."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import msgspec

from phalanx.cluster.clock_offset import answer_ping, exchange_ping, fastest_ping
from phalanx.cluster.software_versions import SoftwareVersions
from phalanx.cluster.task_comparison import TaskDescription
from phalanx.errors import FrameError, LinkClosedError, LinkTimeoutError
from phalanx.transport.handshake import Hello, Welcome
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

DOCTOR = "doctor"
"""Purpose of a connection that queries a task's versions and measures the link."""

TRANSFERS = ((1 << 16, 1.5), (1 << 20, 0.5), (32 << 20, 0.0))
"""Size of each transfer in bytes, and the longest duration after which the next, larger one follows."""
STEP_TIMEOUT_S = 30.0
"""Time limit for one ping or transfer: 64 KiB take 5 s at a latency of 200 ms and 5 % packet loss."""
MEASUREMENT_TIMEOUT_S = 60.0
"""Time limit for the whole measurement of one link."""


class LinkBenchmarkAnswer(msgspec.Struct, frozen=True):
    """A task's answer to a doctor, sent as the details of the Welcome."""

    description: TaskDescription
    software: SoftwareVersions


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """Properties of the link to another task.

    Attributes:
        round_trip_s: Shortest round trip of several small messages.
        clock_offset_s: Lead of the other clock over this one in seconds; uncertain by half the round trip.
        bytes_per_s: Bandwidth of one large message to the other task.
    """

    round_trip_s: float
    clock_offset_s: float
    bytes_per_s: float


class LinkBenchmarkService:
    """The service that answers pings, with one thread per link.

    Args:
        answer: The answer to send in the Welcome.
        tasks: Number of tasks in the cluster. A link is idle while its owner measures its other links.
    """

    def __init__(self, answer: LinkBenchmarkAnswer, tasks: int):
        self._answer = answer
        self._idle_timeout_s = MEASUREMENT_TIMEOUT_S * tasks
        self._changed = threading.Condition()  # protects everything below
        self._open_links = 0  # incremented by the listener, decremented by the threads
        self._finished: set[str] = set()

    def admit(self, hello: Hello) -> Welcome:
        del hello
        return Welcome(details=msgspec.msgpack.encode(self._answer))

    def adopt(self, hello: Hello, link: Link) -> None:
        with self._changed:
            self._open_links += 1
        threading.Thread(
            target=self._serve, args=(hello, link), name=f"phalanx-doctor-{hello.task}", daemon=True
        ).start()

    def wait_for(self, tasks: set[str], timeout_s: float) -> None:
        """Wait until these tasks have measured their link to this one and no measurement is running. The timeout is for
        tasks that have not started."""
        with self._changed:
            self._changed.wait_for(lambda: tasks <= self._finished and not self._open_links, timeout=timeout_s)
            self._changed.wait_for(lambda: not self._open_links, timeout=self._idle_timeout_s)

    def _serve(self, hello: Hello, link: Link) -> None:
        try:
            while True:
                link.receive(deadline=time.monotonic() + self._idle_timeout_s)
                answer_ping(link, time.time_ns, timeout_s=STEP_TIMEOUT_S)
        except (LinkClosedError, LinkTimeoutError, FrameError) as error:
            logger.debug("measurement by %s is over: %s", hello.task, error)  # the other end closes the link
        finally:
            link.close()
            with self._changed:
                self._open_links -= 1
                self._finished.add(hello.task)
                self._changed.notify_all()


def measure(link: Link) -> LinkMeasurement:
    """Measure the link to the other end, which runs a `LinkBenchmarkService`.

    Raises: LinkClosedError or LinkTimeoutError if the other end is lost meanwhile.
    """
    round_trip_s, clock_offset_s = (ns / 1e9 for ns in fastest_ping(link, time.time_ns, timeout_s=STEP_TIMEOUT_S))
    seconds = 0.0
    for size, slow_s in TRANSFERS:
        taken_ns, _ = exchange_ping(link, time.time_ns, timeout_s=STEP_TIMEOUT_S, payload=bytes(size))
        seconds = max(taken_ns / 1e9 - round_trip_s, 1e-9)
        if seconds > slow_s:
            break
    return LinkMeasurement(round_trip_s, clock_offset_s, size / seconds)
