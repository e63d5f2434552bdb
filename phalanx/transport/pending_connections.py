"""Connections between accept and `Hello`: each proves the secret within a deadline, or is refused.

A connection that has not proved itself costs one descriptor and a few hundred bytes. It must complete the handshake
within `HANDSHAKE_TIMEOUT_S`. When more than `MAX_ARRIVALS` are pending, one of the sources with the most of them is
dropped, so no source can take the places of others: an IPv4 address, or the IPv6 addresses of one network of 64 bits,
all of which one host may use. Which connection is left to chance, also among sources that have as many: under a flood a
member, which needs milliseconds, is hit rarely, and dials again; the oldest would be a member that is about to finish,
as often as not. Silent connections, port scanners and crowds of members that start at once keep no member out.
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
"""From accept to Hello. Four round trips, which take under 2 s even at a latency of 400 ms."""
MAX_ARRIVALS = 256
"""Connections in the handshake at one time."""
REFUSALS_PER_MINUTE = 20
"""Log lines for refused connections. Further refusals are counted and reported with the next line."""
MAX_REASONS = 1000
"""Distinct refusals that are counted. Reasons quote what a stranger sent, so strangers could exhaust the memory."""


class Arrival:
    """A connection on its way from accept to Hello.

    Attributes:
        source: see the top of this file.
        is_silent: whether it has sent nothing yet.
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
        """Whether it has spoken our protocol so far, and only waited for our answer."""
        return self._handshake.waits_for_proof

    def advance(self) -> Hello | None:
        """Proceed as far as possible without waiting; returns the Hello once it has arrived.

        Raises:
            HandshakeError, FrameError: it is not a member of the job.
            LinkClosedError: it is gone.
        """
        # Until nothing more can be read: TLS and encrypted records may hold bytes that the selector does not see.
        while True:
            # 41 bytes into an empty buffer: there is room unless the peer never reads.
            data = self._handshake.data_to_send()
            if data and self.link.try_send([memoryview(data)]) != len(data):
                raise HandshakeError("it does not read")
            if self._handshake.done:
                # The proof above was still sent as it is; the dialer encrypts from its Hello on.
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
    """The source that an IP address counts as: itself, or its IPv6 network of 64 bits."""
    if ":" not in address:
        return address
    return str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))


class ArrivalQueue:
    """All pending connections of a listener, oldest first. Used by the listener's thread only.

    Args:
        selector: gets every pending link, with its `Arrival` as data.
        credentials: the secret that peers must prove to know, and how connections are encrypted.
        refusals: records each refused connection.
        on_hello: called with a link that has completed the handshake; owns the link from then on.
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
        """When the oldest connection must be done, by `time.monotonic()`; None without connections."""
        # All have the same time, and a dict keeps their order: the first one is due first.
        return next(iter(self._arrivals)).deadline if self._arrivals else None

    def add(self, connection: socket.socket, endpoint: tuple[object, ...]) -> None:
        """Begin the handshake with a connection that was just accepted."""
        # A port for both kinds of IP shows IPv4 addresses as ::ffff:10.0.0.1.
        name = f"{str(endpoint[0]).removeprefix('::ffff:')}:{endpoint[1]}"
        tls = self._credentials.tls
        try:
            encrypt = self._credentials.wants_encryption(connection)
            if tls is not None:
                connection.setblocking(False)
                connection = tls.listener.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            link = Link(connection, name)
        except OSError:
            connection.close()  # gone already
            return
        handshake = Handshake(Role.LISTENER, self._credentials.secret, encrypt=encrypt)
        arrival = Arrival(link, handshake, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._arrivals[arrival] = None
        # Never for writing, also with TLS: what this end sends before the Hello fits into the socket's empty buffer.
        self._selector.register(link, selectors.EVENT_READ, arrival)
        if len(self._arrivals) > MAX_ARRIVALS:
            self.drop_one("too many connected at once")  # perhaps this one, which `advance` then ignores
        self.advance(arrival)

    def advance(self, arrival: Arrival) -> None:
        """Continue the handshake of a connection whose bytes have arrived."""
        if arrival not in self._arrivals:  # dropped since the selector has reported it
            return
        try:
            hello = arrival.advance()
        except WrongSecretError:
            self._refuse(arrival, "wrong secret: its PHALANX_SECRET is not the one of this job, or is not set")
        except (HandshakeError, FrameError) as error:
            self._refuse(arrival, str(error))
        except LinkClosedError as error:
            # Health checks send nothing, and members may stop waiting while this process is still starting: neither
            # deserves a line in the log, unless TLS failed.
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
        """Refuse a connection of one of the sources that have the most, if there is any."""
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
        """Close all pending connections, without a word."""
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
        task: whose port refuses, for messages.
        port: its number, for messages.
        lines: log lines that `period_s` may have at most.
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
        """Count a refusal of `peer`, an `address:port`, and log it unless there were too many."""
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
        """Whether one more line is allowed, which counts as logged if so."""
        now = time.monotonic() if now is None else now
        self._logged_at = [when for when in self._logged_at if when > now - self._period_s]
        if len(self._logged_at) >= self._lines:
            self._suppressed += 1
            return False
        self._logged_at.append(now)
        return True

    def take_suppressed(self) -> str:
        """A note on the lines omitted since the last one; empty if none were."""
        count, self._suppressed = self._suppressed, 0
        return f" ({count} more were refused since the last such line.)" if count else ""

    def summary(self, most: int = 3) -> str:
        """The most frequent refusals in one line; empty without refusals. May be called from any thread."""
        counts = self._counts.copy()
        return "; ".join(
            f"{host} ({number} times: {reason})" if number > 1 else f"{host} ({reason})"
            for (host, reason), number in counts.most_common(most)
        )


def _is_tls_failure(error: LinkClosedError) -> bool:
    """Whether the two ends talked, but could not agree on TLS."""
    return isinstance(error.__cause__, ssl.SSLError) and not isinstance(error.__cause__, ssl.SSLEOFError)


def _describe_disconnect(error: LinkClosedError, *, tls: bool) -> str:
    """Why a connection broke during the handshake; with TLS the likeliest cause is that the peer has none."""
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
