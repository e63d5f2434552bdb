"""Connections between accept and `Hello`: each proves the secret within a deadline, or is refused.

A connection that has not proved itself costs one descriptor and a few hundred bytes. It must complete the handshake
within `HANDSHAKE_TIMEOUT_S`. When more than `MAX_ARRIVALS` are pending, a connection of the source with the most of
them is dropped, so no source can displace others. A source is an IPv4 address, or the IPv6 addresses of a 64-bit
network, all of which one host may use. The connection is chosen at random, also among sources with equally many. Under
a flood, a member, which needs milliseconds, is rarely hit and dials again; the oldest connection would often be a
member that is about to finish. Silent connections, port scanners and crowds of members that start at once keep no
member out.
"""

from __future__ import annotations

import ipaddress
import logging
import random
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable

from phalanx.errors import FrameError, HandshakeError, LinkClosedError
from phalanx.transport.credentials import Credentials
from phalanx.transport.decoding import decode_message
from phalanx.transport.frames import FrameReader
from phalanx.transport.handshake import Handshake, Hello, Role, WrongSecretError
from phalanx.transport.link import Link

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
"""Time from accept to Hello: four round trips, which take less than 2 s even at a latency of 400 ms."""
MAX_ARRIVALS = 256
"""Maximum number of connections in the handshake at one time."""
REFUSALS_PER_MINUTE = 20
"""Maximum log lines for refused connections. Further refusals are counted and reported with the next line."""
MAX_REASONS = 1000
"""Distinct refusals that are counted. Reasons quote what a stranger sent, so strangers could fill the memory."""


class Arrival:
    """A connection between accept and Hello.

    Attributes:
        source: Source of the connection; see the top of this file.
        is_silent: Whether it has sent nothing yet.
    """

    def __init__(self, link: Link, handshake: Handshake, deadline: float):
        self.link = link
        self.source = source_of(link.peer.rpartition(":")[0])
        self.deadline = deadline
        self.is_silent = True
        self._handshake = handshake
        # A Hello carries no buffers, so none are allocated for it.
        self._reader = FrameReader(max_payload_bytes=0)

    @property
    def waits_for_us(self) -> bool:
        """Whether it has spoken our protocol so far and is only waiting for our answer."""
        return self._handshake.waits_for_proof

    def advance(self) -> Hello | None:
        """Proceed as far as possible without waiting. Return the Hello once it has arrived.

        Raises:
            HandshakeError, FrameError: The peer is not a member of the job.
            LinkClosedError: The peer is gone.
        """
        # Until nothing more can be read: TLS and encrypted records may hold bytes that the selector does not see.
        while True:
            # 41 bytes into an empty buffer: there is room unless the peer never reads.
            data = self._handshake.data_to_send()
            if data and self.link.try_send([memoryview(data)]) != len(data):
                raise HandshakeError("it does not read")
            if self._handshake.done:
                # The proof above was sent unencrypted; the dialer encrypts from its Hello on.
                if self._handshake.keys and not self.link.encrypted:
                    self.link.encrypt(self._handshake.keys)
                target = self._reader.get_buffer()
            else:
                target = memoryview(bytearray(self._handshake.bytes_needed()))
            count = self.link.try_receive_into(target)
            if not count:
                return None
            self.is_silent = False
            if not self._handshake.done:
                self._handshake.receive_data(bytes(target[:count]))
            elif frame := self._reader.buffer_updated(count):
                return decode_message(frame.header, Hello)


def source_of(address: str) -> str:
    """Source of an IP address: the address itself, or its 64-bit IPv6 network."""
    if ":" not in address:
        return address
    return str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))


class ArrivalQueue:
    """All pending connections of a listener, oldest first. Used by the listener's thread only.

    Args:
        selector: Selector that gets every pending link, with its `Arrival` as data.
        credentials: Secret that peers must prove, and how connections are encrypted.
        refusals: Log of refused connections.
        on_hello: Callback for a link that has completed the handshake; owns the link from then on.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        credentials: Credentials,
        refusals: RefusalLog,
        on_hello: Callable[[Link, Hello], None],
    ):
        self._selector = selector
        self._credentials = credentials
        self._refusals = refusals
        self._on_hello = on_hello
        self._arrivals: dict[Arrival, None] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def next_deadline(self) -> float | None:
        """Deadline of the oldest connection, by `time.monotonic()`; None without connections."""
        # All have the same timeout, and a dict keeps their order: the first one is due first.
        return next(iter(self._arrivals)).deadline if self._arrivals else None

    def add(self, connection: socket.socket, endpoint: tuple[object, ...]) -> None:
        """Begin the handshake of an accepted connection."""
        # A dual-stack port shows IPv4 addresses as ::ffff:10.0.0.1.
        name = f"{str(endpoint[0]).removeprefix('::ffff:')}:{endpoint[1]}"
        tls = self._credentials.tls
        try:
            encrypt = self._credentials.wants_encryption(connection)
            if tls is not None:
                connection.setblocking(False)
                connection = tls.listener.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            link = Link(connection, name)
        except OSError:
            connection.close()  # already closed
            return
        handshake = Handshake(Role.LISTENER, self._credentials.secret, encrypt=encrypt)
        arrival = Arrival(link, handshake, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._arrivals[arrival] = None
        # Never for writing, even with TLS: what this end sends before the Hello fits into the socket's empty buffer.
        self._selector.register(link, selectors.EVENT_READ, arrival)
        if len(self._arrivals) > MAX_ARRIVALS:
            self.drop_one("too many connected at once")  # may be this one, which `advance` then ignores
        self.advance(arrival)

    def advance(self, arrival: Arrival) -> None:
        """Continue the handshake of a connection whose bytes have arrived."""
        if arrival not in self._arrivals:  # dropped after the selector reported it
            return
        try:
            hello = arrival.advance()
        except WrongSecretError:
            self._refuse(arrival, "wrong secret: its PHALANX_SECRET is not the one of this job, or is not set")
        except (HandshakeError, FrameError) as error:
            self._refuse(arrival, str(error))
        except LinkClosedError as error:
            # Health checks send nothing, and members may stop waiting while this process is starting. Neither is
            # logged, unless TLS failed.
            is_harmless = (arrival.is_silent or arrival.waits_for_us) and not _is_tls_failure(error)
            self._refuse(
                arrival, _describe_disconnect(error, tls=self._credentials.tls is not None), is_harmless=is_harmless
            )
        else:
            if hello is not None:
                self._remove(arrival)
                arrival.link.peer = hello.task
                self._on_hello(arrival.link, hello)

    def drop_one(self, reason: str) -> None:
        """Refuse a connection of a source with the most connections, if there is any."""
        counts = Counter(arrival.source for arrival in self._arrivals)
        most = max(counts.values(), default=0)
        if chosen := [arrival for arrival in self._arrivals if counts[arrival.source] == most]:
            self._refuse(random.choice(chosen), reason)

    def drop_expired(self) -> None:
        """Refuse all connections whose deadline has passed."""
        while self.next_deadline is not None and self.next_deadline <= time.monotonic():
            reason = f"it did not complete the handshake in {HANDSHAKE_TIMEOUT_S:g} s"
            self._refuse(next(iter(self._arrivals)), reason)

    def close(self) -> None:
        """Close all pending connections without an answer."""
        for arrival in self._arrivals:
            arrival.link.close()
        self._arrivals.clear()

    def _refuse(self, arrival: Arrival, reason: str, *, is_harmless: bool = False) -> None:
        self._remove(arrival)
        arrival.link.close()
        if not is_harmless:
            self._refusals.record(arrival.link.peer, reason)

    def _remove(self, arrival: Arrival) -> None:
        del self._arrivals[arrival]
        self._selector.unregister(arrival.link)


class RefusalLog:
    """Counts refusals by host and reason, and logs a limited number of them.

    Args:
        task: Task whose port refuses, for messages.
        port: Port number, for messages.
        lines: Maximum number of log lines per `period_s`.
    """

    def __init__(self, task: str, port: int, lines: int = REFUSALS_PER_MINUTE, period_s: float = 60.0):
        self._task = task
        self._port = port
        self._lines = lines
        self._period_s = period_s
        self._counts: Counter[tuple[str, str]] = Counter()
        self._logged_at: list[float] = []
        self._suppressed = 0

    def record(self, peer: str, reason: str) -> None:
        """Count a refusal of `peer` (`address:port`), and log it unless there were too many."""
        self.count(peer.rpartition(":")[0], reason)
        if self.may_log():
            logger.warning(
                "%s refused a connection from %s to its port %d: %s. The job continues.%s",
                self._task,
                peer,
                self._port,
                reason.rstrip("."),
                self.take_suppressed(),
            )

    def count(self, host: str, reason: str) -> None:
        """Count a refusal without logging it."""
        if (host, reason) in self._counts or len(self._counts) < MAX_REASONS:
            self._counts[host, reason] += 1

    def may_log(self, now: float | None = None) -> bool:
        """Return whether one more line is allowed; if so, it counts as logged."""
        now = time.monotonic() if now is None else now
        self._logged_at = [when for when in self._logged_at if when > now - self._period_s]
        if len(self._logged_at) >= self._lines:
            self._suppressed += 1
            return False
        self._logged_at.append(now)
        return True

    def take_suppressed(self) -> str:
        """Return a note on the lines omitted since the last one; empty if there were none."""
        count, self._suppressed = self._suppressed, 0
        return f" ({count} more were refused since the last such line.)" if count else ""

    def summary(self, most: int = 3) -> str:
        """Return the most frequent refusals in one line; empty without refusals. May be called from any thread."""
        counts = self._counts.copy()
        return "; ".join(
            f"{host} ({number} times: {reason})" if number > 1 else f"{host} ({reason})"
            for (host, reason), number in counts.most_common(most)
        )


def _is_tls_failure(error: LinkClosedError) -> bool:
    """Whether the two ends communicated but could not agree on TLS."""
    return isinstance(error.__cause__, ssl.SSLError) and not isinstance(error.__cause__, ssl.SSLEOFError)


def _describe_disconnect(error: LinkClosedError, *, tls: bool) -> str:
    """Describe why a connection broke during the handshake. With TLS, the likeliest cause is that the peer lacks it."""
    text = str(error.__cause__ or error)
    if not tls:
        return "it hung up in the middle of the handshake"
    if "ALERT" in text:
        return f"it refused the certificate of this task, PHALANX_TLS_CERT ({text})"
    if "HTTP_REQUEST" in text:
        return "it is an HTTP client and this port speaks TLS"
    if "WRONG_VERSION_NUMBER" in text or "UNKNOWN_PROTOCOL" in text or "RECORD_LAYER" in text:
        return "it sent plain text and this port speaks TLS: PHALANX_TLS_* must be set on all tasks"
    return f"TLS failed ({text})"
