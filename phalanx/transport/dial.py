"""Connects to the port of another task."""

from __future__ import annotations

import socket
import ssl
import time

import msgspec

from phalanx.errors import FrameError, HandshakeError, LinkClosedError, LinkTimeoutError
from phalanx.transport.address import Address
from phalanx.transport.credentials import Credentials
from phalanx.transport.decoding import decode_message
from phalanx.transport.handshake import Handshake, Hello, Role, Welcome, WrongSecretError
from phalanx.transport.link import Link
from phalanx.transport.name_resolution import resolve
from phalanx.transport.tls import TLS

CONNECT_TIMEOUT_S = 5.0
"""For one attempt at one IP address. Short, so that an address that drops packets does not delay the next one much.
Longer than the 3 s after which a lost first packet has been retransmitted twice."""

ATTEMPT_TIMEOUT_S = 5.0
"""For one attempt to reach a task, including the handshake."""
HANDSHAKE_FAILURES_S = 10.0
"""A task that keeps hanging up for this long has a different secret or is a different program, so waiting is useless.
Not shorter, because a process of an earlier job may be about to free the port."""
FIRST_RETRY_S = 0.01
LAST_RETRY_S = 1.0
RETRY_SHARE = 0.05
"""The next attempt follows after 5 % of the time waited so far: the wait is at most 5 % longer than necessary, and a
peer that is minutes late is dialed once a second."""


class UnreachableError(LinkClosedError):
    """The address currently has no route, or its name is unknown. This says nothing about what listens there."""


class RefusedError(HandshakeError):
    """The other task recognized this task and refused it.

    Attributes:
        welcome: Answer of the other task, with the kind of and the reason for the refusal.
    """

    def __init__(self, message: str, welcome: Welcome):
        super().__init__(message)
        self.welcome = welcome


def retry_delay_s(waited_s: float) -> float:
    """Seconds to wait before the next attempt, after `waited_s` seconds of attempts."""
    return min(max(waited_s * RETRY_SHARE, FIRST_RETRY_S), LAST_RETRY_S)


def dial(
    address: Address,
    hello: Hello,
    *,
    credentials: Credentials,
    bulk: bool = False,
    deadline: float,
) -> tuple[Link, Welcome]:
    """Connect once, prove the secret, and state the purpose.

    Args:
        address: Address of the other task.
        hello: Introduction of this task, with the name of the other task and the purpose of the link.
        credentials: Secret of the job, and how the connection is encrypted.
        bulk: Whether the link carries training data, so that `credentials.encryption` applies to it.
        deadline: Time at which to give up, by `time.monotonic()`.

    Returns: The link, and the other end's answer.

    Raises:
        LinkClosedError: Nothing listens there, or it hung up. Temporary: try again.
        UnreachableError: There is no route, or the name is unknown. Temporary.
        LinkTimeoutError: There was no answer. Temporary.
        RefusedError: The other end did not accept the Hello.
        HandshakeError: The other end does not belong to this job, or has a different secret or version.
    """
    peer = hello.peer
    sock = connect(address, peer, deadline=deadline, tls=credentials.tls)
    try:
        encrypt = credentials.wants_encryption(sock, bulk=bulk)
        link = Link(sock, peer)
    except OSError as error:  # an exiting process resets connections that it has not accepted
        sock.close()
        raise LinkClosedError(f"{peer} at {address} hung up at once ({error.strerror or error})") from error
    try:
        _shake_hands(link, Handshake(Role.DIALER, credentials.secret, encrypt=encrypt), deadline)
        link.send(msgspec.msgpack.encode(hello), deadline=deadline)
        header, _ = link.receive(deadline=deadline)
        welcome = decode_message(header, Welcome)
        if welcome.refusal:
            raise RefusedError(f"{peer} at {address} refused: {welcome.reason}", welcome)
    except FrameError as error:
        link.close()
        raise HandshakeError(f"{peer} at {address} sent an unexpected answer: {error}") from error
    except BaseException:
        link.close()
        raise
    return link, welcome


def connect(address: Address, peer: str, *, deadline: float, tls: TLS | None = None) -> socket.socket:
    """Connect once, without sending anything.

    Args:
        address: Address to connect to.
        peer: Name of the other end, for messages.
        deadline: Time at which to give up, by `time.monotonic()`.
        tls: Contexts to wrap the connection in TLS, whose handshake runs with the first bytes; None for no TLS.

    Raises: LinkClosedError, UnreachableError, LinkTimeoutError as for `dial`.
    """
    try:
        candidates = resolve(address, max(0.0, deadline - time.monotonic()))
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or too long label of the host name
        reason = getattr(error, "strerror", None) or error
        raise UnreachableError(
            f"the host name {address.host!r} of {peer} cannot be resolved here ({reason})"
        ) from error
    failure: OSError | None = None
    for tried, (family, kind, protocol, _, where) in enumerate(candidates):
        # The addresses share the remaining time, so that one that drops packets leaves time for the next.
        timeout_s = min((deadline - time.monotonic()) / (len(candidates) - tried), CONNECT_TIMEOUT_S)
        if timeout_s <= 0:
            break
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # a kernel without IPv6
            failure = failure or error
            continue
        try:
            sock.settimeout(timeout_s)
            sock.connect(where)
            # Without a listener, a port in the range of outgoing ports can connect to itself.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError("nothing listens")
            if tls is not None:
                # The link applies its own deadlines.
                sock.setblocking(False)
                return tls.dialer.wrap_socket(sock, do_handshake_on_connect=False)
            return sock
        except OSError as error:
            sock.close()
            failure = error  # the failure of the last address is reported
        except BaseException:
            sock.close()
            raise
    if isinstance(failure, ConnectionRefusedError):
        raise LinkClosedError(f"nothing listens at {address} yet (connection refused)") from failure
    if isinstance(failure, ConnectionError):  # a host has answered
        raise LinkClosedError(f"{address} cannot be reached ({failure.strerror or failure})") from failure
    if failure is None or isinstance(failure, TimeoutError):
        raise LinkTimeoutError(f"{address} does not answer (wrong address, host down, or a firewall)")
    raise UnreachableError(f"{address} cannot be reached ({failure.strerror or failure})") from failure


def _tls_failure(peer: str, error: ssl.SSLError) -> str:
    """Describe which end's certificate is at fault. An alert refers to our own."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {peer} is not accepted here: {error.verify_message} (PHALANX_TLS_CA of this task)"
    if "ALERT" in str(error):
        return f"{peer} does not accept the certificate of this task, PHALANX_TLS_CERT: {error}"
    return f"TLS with {peer} failed: {error}"


def _shake_hands(link: Link, handshake: Handshake, deadline: float) -> None:
    try:
        while True:
            if data := handshake.data_to_send():
                link.send_bytes([memoryview(data)], deadline=deadline)
            if handshake.done:
                # Both proofs were sent unencrypted. From here on, everything is encrypted in both directions.
                if handshake.keys:
                    link.encrypt(handshake.keys)
                return
            buffer = memoryview(bytearray(handshake.bytes_needed()))
            count = link.try_receive_into(buffer)
            if count:
                handshake.receive_data(bytes(buffer[:count]))
            elif not link.wait_readable(deadline=deadline):
                raise LinkTimeoutError(
                    f"{link.peer} has not answered yet: its process is still starting, busy or stopped, or another "
                    f"program listens there"
                )
    except WrongSecretError as error:
        raise WrongSecretError(f"{link.peer}: {error}") from error
    except HandshakeError as error:
        raise HandshakeError(f"what listens at the address of {link.peer} is not it: {error}") from error
    except LinkClosedError as error:
        # The peer received our proof and hung up without an answer, as a listener does with strangers.
        if handshake.waits_for_proof:
            raise WrongSecretError(
                f"{link.peer} hung up when it saw our proof of the secret: PHALANX_SECRET differs, or is set "
                f"at only one of the two ends (or it had too many connections: its log says so)"
            ) from error
        if isinstance(error.__cause__, ssl.SSLError):
            raise HandshakeError(_tls_failure(link.peer, error.__cause__)) from error
        raise LinkClosedError(
            f"{link.peer} hung up during the handshake: its process is exiting, or only one of the two ends "
            f"has TLS (PHALANX_TLS_CERT, _KEY and _CA must be set on all tasks or none)"
        ) from error
