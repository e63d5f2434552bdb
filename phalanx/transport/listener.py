"""The one port of a task: accepts connections, tells strangers from members, hands the links on by purpose.

One thread does all of it, with a selector, for the whole life of the task. A connection that has not yet
proved itself costs one descriptor and some hundred bytes; it must get through within `HANDSHAKE_TIMEOUT_S`,
and when more than `MAX_ARRIVALS` are on their way, the one that has waited longest is dropped: a member of
ours needs milliseconds, so it is a stranger. Thus thousands of idle connections, port scanners and browsers
keep nobody out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections import Counter
from typing import Protocol

import msgspec

from phalanx.config.variables import LISTEN_FD, SECRET
from phalanx.errors import ConfigurationError, FrameError, HandshakeError, LinkClosedError, LinkTimeoutError
from phalanx.transport.address import Address
from phalanx.transport.frames import FrameReader
from phalanx.transport.handshake import Handshake, Hello, Role, Welcome, WrongSecretError
from phalanx.transport.link import Link
from phalanx.transport.tls import TLS

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
"""From accept to Hello. Four round trips, which take under 2 s even on a line with 400 ms of delay."""
MAX_ARRIVALS = 256
"""Connections on their way through the handshake at one time."""
BACKLOG = 1024
"""Connections that the kernel keeps for us while the thread does not run: a whole large job at once."""
WELCOME_TIMEOUT_S = 2.0
"""To write the answer, some hundred bytes into an empty buffer: it takes no time at all unless the peer is
gone."""
OUT_OF_DESCRIPTORS_PAUSE_S = 0.1
"""Pause of accepting when the process has no descriptor left; without it the loop would spin."""
REFUSALS_PER_MINUTE = 20
"""Log lines for refused connections. More are counted and told with the next line."""

UNAVAILABLE = "unavailable"
"""Refusal: this purpose is not served here, or not yet."""
OTHER_JOB = "other job"
"""Refusal: the port belongs to another job."""


class Service(Protocol):
    """What serves one purpose. Both methods run in the listener's thread and must not block."""

    def admit(self, hello: Hello) -> Welcome:
        """The answer to a Hello of a peer that knows the secret."""
        ...

    def adopt(self, hello: Hello, link: Link) -> None:
        """Take over the link, if the answer was no refusal and has been sent."""
        ...


class Listener:
    """Owns the listening sockets and the thread that accepts from them.

    Args:
        sockets: listening sockets, see `open_listening_sockets`; the listener owns them from here on.
        task: whose port it is, for messages.
        secret: what peers must know.
        job: what job they must belong to.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        *,
        task: str,
        secret: bytes | None,
        job: str = "",
        tls: TLS | None = None,
    ):
        self.task = task
        self.port: int = sockets[0].getsockname()[1]
        self._sockets = sockets
        self._secret = secret
        self._job = job
        self._tls = tls
        self._services: dict[str, Service] = {}
        self._lock = threading.Lock()  # protects _services, _stopping
        self._stopping = False
        self._refusals = RefusalCounter()
        self._selector = selectors.DefaultSelector()
        self._arrivals: dict[_Arrival, None] = {}  # oldest first
        self._accept_again_at = 0.0
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"phalanx-listener-{task}", daemon=True)

    def __enter__(self) -> Listener:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start to accept."""
        for sock in self._sockets:
            sock.setblocking(False)
        self._set_accepting(True)
        self._wake_receiver.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        _listeners.add(self)
        self._thread.start()

    def register(self, purpose: str, service: Service) -> None:
        """Serve a purpose from now on; what served it before is replaced."""
        with self._lock:
            self._services[purpose] = service

    def unregister(self, purpose: str) -> None:
        """Serve this purpose no more."""
        with self._lock:
            self._services.pop(purpose, None)

    def refusal_summary(self) -> str:
        """Who was refused so far and why, for the message of an error; empty if nobody was."""
        return self._refusals.summary()

    def close(self) -> None:
        """Stop accepting and free the port; safe to call twice. Links that were handed on stay open."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        else:
            self._free()

    # ------------------------------------------------------- the listener's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(self._time_to_next_deadline()):
                    if isinstance(key.data, _Arrival):
                        self._advance(key.data)
                    elif key.data == "accept":
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                    else:
                        self._drain_wakes()
                self._drop_the_late()
        finally:
            self._free()

    def _free(self) -> None:
        for arrival in list(self._arrivals):
            arrival.link.close()
        self._arrivals.clear()
        self._selector.close()
        for sock in (*self._sockets, self._wake_receiver, self._wake_sender):
            sock.close()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(64)

    def _time_to_next_deadline(self) -> float | None:
        deadlines = [next(iter(self._arrivals)).deadline] if self._arrivals else []
        if self._accept_again_at:
            deadlines.append(self._accept_again_at)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _set_accepting(self, accepting: bool) -> None:
        for sock in self._sockets:
            if accepting:
                self._selector.register(sock, selectors.EVENT_READ, "accept")
            else:
                self._selector.unregister(sock)

    def _accept(self, sock: socket.socket) -> None:
        # Bounded, so that a flood of new connections does not keep those under way from going on.
        for _ in range(64):
            try:
                connection, where = sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # It was gone before we took it.
            except OSError as error:
                self._pause_accepting(error)
                return
            self._begin(connection, where)

    def _pause_accepting(self, error: OSError) -> None:
        """The process or the system is out of descriptors or memory: make room and try again in a moment."""
        if self._accept_again_at:
            return
        if self._refusals.may_log():
            logger.warning("%s cannot accept connections for the moment: %s", self.task, error)
        if self._arrivals:
            self._refuse(next(iter(self._arrivals)), "it made no progress while descriptors were short")
        self._accept_again_at = time.monotonic() + OUT_OF_DESCRIPTORS_PAUSE_S
        self._set_accepting(False)

    def _begin(self, connection: socket.socket, where: tuple[object, ...]) -> None:
        # A port for both kinds of IP shows IPv4 addresses as ::ffff:10.0.0.1.
        name = f"{str(where[0]).removeprefix('::ffff:')}:{where[1]}"
        try:
            if self._tls is not None:
                connection.setblocking(False)
                connection = self._tls.listener.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            link = Link(connection, name)
        except OSError:
            connection.close()  # Gone already.
            return
        arrival = _Arrival(link, self._secret, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._arrivals[arrival] = None
        self._selector.register(link, selectors.EVENT_READ, arrival)
        if len(self._arrivals) > MAX_ARRIVALS:
            self._refuse(next(iter(self._arrivals)), "it was idle while more than enough others came")
        self._advance(arrival)

    def _drop_the_late(self) -> None:
        now = time.monotonic()
        for arrival in list(self._arrivals):
            if arrival.deadline > now:
                break
            self._refuse(arrival, f"it did not get through the handshake in {HANDSHAKE_TIMEOUT_S:g} s")
        if self._accept_again_at and self._accept_again_at <= now:
            self._accept_again_at = 0.0
            self._set_accepting(True)

    def _advance(self, arrival: _Arrival) -> None:
        if arrival not in self._arrivals:
            return
        try:
            hello = arrival.advance()
        except WrongSecretError:
            self._refuse(arrival, "wrong secret: its PHALANX_SECRET is not the one of this job, or is not set")
        except (HandshakeError, FrameError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self._refuse(arrival, str(error))
        except LinkClosedError as error:
            silent = (arrival.untouched or arrival.gave_up) and not _is_tls_failure(error)
            self._refuse(arrival, _describe_break(error, tls=self._tls is not None), silent=silent)
        else:
            if hello is not None:
                self._hand_on(arrival, hello)

    def _refuse(self, arrival: _Arrival, reason: str, *, silent: bool = False) -> None:
        """Close the connection, with a line in the log. No line for who says nothing, such as a health check, or is
        one of ours that stopped waiting while this process was still starting."""
        self._forget(arrival)
        arrival.link.close()
        if silent:
            return
        where = arrival.link.peer
        self._refusals.count(where.rpartition(":")[0], reason)
        if self._refusals.may_log():
            logger.warning(
                "%s refused a connection from %s to its port %d: %s. The job goes on.%s",
                self.task,
                where,
                self.port,
                reason.rstrip("."),
                self._refusals.take_suppressed(),
            )

    def _forget(self, arrival: _Arrival) -> None:
        del self._arrivals[arrival]
        self._selector.unregister(arrival.link)

    def _hand_on(self, arrival: _Arrival, hello: Hello) -> None:
        self._forget(arrival)
        link = arrival.link
        link.peer = hello.task
        with self._lock:
            service = self._services.get(hello.purpose)
        try:
            if hello.job != self._job:
                welcome = Welcome(
                    refusal=OTHER_JOB,
                    reason=f"this port is that of {self.task} of job {self._job!r}, not of job {hello.job!r}",
                )
            elif service is None:
                welcome = Welcome(
                    refusal=UNAVAILABLE, reason=f"{self.task} does not serve {hello.purpose!r}, or not yet"
                )
            else:
                welcome = service.admit(hello)
            link.send(msgspec.msgpack.encode(welcome), deadline=time.monotonic() + WELCOME_TIMEOUT_S)
            if welcome.refusal or service is None:
                logger.info("%s refused %s (%s): %s", self.task, hello.task, hello.purpose, welcome.reason)
                link.close()
            else:
                service.adopt(hello, link)
        except (LinkClosedError, LinkTimeoutError) as error:
            logger.info("%s was gone before it was answered: %s", hello.task, error)
            link.close()
        except Exception:
            # A defect in a service must not take the port down with it.
            logger.exception("%s could not serve %s (%s)", self.task, hello.task, hello.purpose)
            link.close()


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_inherited_listeners() -> None:
    """In a forked child: let go of the port, which would stay taken as long as the child lives."""
    for listener in list(_listeners):
        listener._stopping = True
        listener._free()
    for descriptor, inode in _adopted.items():
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:  # else it was closed, and its number is somebody else's
                os.close(descriptor)
    _adopted.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_listeners)


class _Arrival:
    """A connection on its way from accept to Hello."""

    def __init__(self, link: Link, secret: bytes | None, deadline: float):
        self.link = link
        self.deadline = deadline
        self.untouched = True
        self._handshake = Handshake(Role.LISTENER, secret)
        # A Hello carries no buffers, so none are allocated for it.
        self._reader = FrameReader(max_payload_bytes=0)

    @property
    def gave_up(self) -> bool:
        """Whether it spoke our protocol so far, and only waited for us."""
        return self._handshake.waits_for_proof

    def advance(self) -> Hello | None:
        """Go on as far as possible without waiting; the Hello when it is here.

        Raises: HandshakeError, FrameError, MsgspecError for a stranger, LinkClosedError when it is gone.
        """
        while True:
            # Some 40 bytes into an empty buffer: there is room, so this need not wait.
            data = self._handshake.data_to_send()
            if data and self.link.try_send([memoryview(data)]) != len(data):
                raise HandshakeError("it does not read")
            if self._handshake.done:
                target = self._reader.get_buffer()
            else:
                target = memoryview(bytearray(self._handshake.bytes_needed()))
            count = self.link.try_receive_into(target)
            if not count:
                return None
            self.untouched = False
            if not self._handshake.done:
                self._handshake.receive_data(bytes(target[:count]))
            elif frame := self._reader.buffer_updated(count):
                return msgspec.msgpack.decode(frame.header, type=Hello)


class RefusalCounter:
    """Counts refusals by host and reason, and says how many lines the log gets."""

    def __init__(self, lines: int = REFUSALS_PER_MINUTE, period_s: float = 60.0):
        self._lines = lines
        self._period_s = period_s
        self._counts: Counter[tuple[str, str]] = Counter()
        self._logged: list[float] = []
        self._suppressed = 0

    def count(self, host: str, reason: str) -> None:
        # Reasons quote what a stranger sent: bound what it can make us keep.
        if len(self._counts) < 1000:
            self._counts[host, reason] += 1

    def may_log(self, now: float | None = None) -> bool:
        now = time.monotonic() if now is None else now
        self._logged = [when for when in self._logged if when > now - self._period_s]
        if len(self._logged) >= self._lines:
            self._suppressed += 1
            return False
        self._logged.append(now)
        return True

    def take_suppressed(self) -> str:
        """The note on lines that were left out since the last one; empty if none were."""
        count, self._suppressed = self._suppressed, 0
        return f" ({count} more were refused since the last such line.)" if count else ""

    def summary(self, most: int = 3) -> str:
        counts = self._counts.copy()
        return "; ".join(
            f"{host} ({number} times: {reason})" if number > 1 else f"{host} ({reason})"
            for (host, reason), number in counts.most_common(most)
        )


def _is_tls_failure(error: LinkClosedError) -> bool:
    """Whether the two ends talked, but could not agree on TLS."""
    return isinstance(error.__cause__, ssl.SSLError) and not isinstance(error.__cause__, ssl.SSLEOFError)


def _describe_break(error: LinkClosedError, *, tls: bool) -> str:
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


# ------------------------------------------------------------------ opening the port


def open_listening_sockets(
    address: Address, *, secret: bytes | None, listen_fd: int | None = None
) -> list[socket.socket]:
    """Listening sockets for a task's address, on its port.

    A task whose address is loopback listens there only. Any other task listens on all interfaces, since its
    address may be translated on the way (containers, NAT); without a secret that gets a warning.

    Args:
        listen_fd: a socket that is listening already, from the launcher, to use instead.

    Raises:
        PortTakenError: another process listens on this port.
        ConfigurationError: the port cannot be had for another reason; the message says which.
    """
    if not address.is_loopback and not secret:
        warn_no_secret(address)
    if listen_fd is not None:
        return [_adopt_descriptor(listen_fd, address.port)]
    if address.is_loopback:
        return _listen_on_loopback(address)
    return [_listen_on_all(address)]


class PortTakenError(ConfigurationError):
    """Another process listens on the port of this task."""


_warned_no_secret = False


def warn_no_secret(address: Address) -> None:
    """Say once for each process that anybody may join."""
    global _warned_no_secret
    if _warned_no_secret:
        return
    _warned_no_secret = True
    logger.warning(
        "%s is not set, so whoever reaches port %d of this host can join the job or disturb it. Set the "
        "same random value for all tasks (python -c 'import secrets; print(secrets.token_hex())'), or start "
        "the job with `phalanx run`, which does so.",
        SECRET,
        address.port,
    )


def _adopt_descriptor(descriptor: int, port: int) -> socket.socket:
    advice = f"Unset {LISTEN_FD}: `phalanx run` sets it for the processes that it starts itself."
    try:
        sock = _duplicate(descriptor)
    except OSError as error:
        raise ConfigurationError(f"{LISTEN_FD}={descriptor} is no socket ({error.strerror}). {advice}") from error
    try:
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        own_port = sock.getsockname()[1] if sock.family in (socket.AF_INET, socket.AF_INET6) else None
        if not listening or own_port != port:
            raise ConfigurationError(
                f"{LISTEN_FD}={descriptor} is not a socket that listens on this task's port {port}. {advice}"
            )
    except BaseException:
        sock.close()
        raise
    # The original stays open, so that the process can leave the job and join it again. Its own children must not
    # have it: neither programs that it starts nor processes that it forks.
    with contextlib.suppress(OSError):
        os.set_inheritable(descriptor, False)
    _adopted[descriptor] = os.fstat(descriptor).st_ino
    return sock


def _duplicate(descriptor: int) -> socket.socket:
    """Raises OSError if it is no socket."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


_adopted: dict[int, int] = {}
"""Descriptors of the launcher's listening sockets, to be closed in forked children, and their inodes."""


def _listen_on_loopback(address: Address) -> list[socket.socket]:
    """On every loopback address of the name: `localhost` may be 127.0.0.1, ::1 or both."""
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    try:
        for family, _, _, _, where in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                sockets.append(_listen(family, where))
            except OSError as error:
                # ::1 stands in /etc/hosts also where IPv6 is switched off.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                failure = error
        if not sockets:
            raise failure or OSError(errno.EADDRNOTAVAIL, "the name has no address")
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise _cannot_listen(address, error) from error
    return sockets


def _listen_on_all(address: Address) -> socket.socket:
    try:
        try:
            return _listen(socket.AF_INET6, ("::", address.port), dual=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENOPROTOOPT):
                raise
            return _listen(socket.AF_INET, ("0.0.0.0", address.port))
    except OSError as error:
        raise _cannot_listen(address, error) from error


def _listen(family: int, where: tuple[object, ...], *, dual: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Only over connections that are closing: a port on which somebody listens stays taken.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _cannot_listen(address: Address, error: OSError) -> ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(
            f"port {address.port} of this host is taken by another process (`ss -ltnp 'sport = "
            f":{address.port}'` shows which). End it, or give this task another port in the cluster, on all "
            f"tasks."
        )
    if error.errno == errno.EACCES:
        return ConfigurationError(
            f"port {address.port} may not be opened by this user: ports below 1024 are the system's. Choose another."
        )
    if isinstance(error, socket.gaierror):
        return ConfigurationError(f"this task's own host name {address.host!r} cannot be resolved ({error}).")
    return ConfigurationError(f"this task cannot listen at {address}: {error}.")
