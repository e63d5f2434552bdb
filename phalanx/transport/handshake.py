"""The handshake: both ends of a connection prove that they know the job's secret. Bytes in, bytes out.

    dialer    -> listener   8 bytes magic with the protocol's version, 32 bytes nonce
    listener  -> dialer     8 bytes magic with the protocol's version, 32 bytes nonce
    dialer    -> listener   32 bytes HMAC-SHA256(secret, "dialer" | magic | both nonces)
    listener  -> dialer     32 bytes HMAC-SHA256(secret, "listener" | magic | both nonces)

All messages have a fixed length, so nothing that a stranger sends is interpreted or allocated for. The nonces of both
ends make a proof useless in any other connection; the role in it prevents a proof from being reflected to its sender.
The dialer proves first: a connection without the secret gets nothing but a random number.

Then each end sends one frame, `Hello` and `Welcome`, and the link goes to the service of its purpose. The handshake
authenticates but does not encrypt; TLS (`phalanx.transport.tls`), which runs below it, does.

Source: the challenge-response of RFC 2104 and RFC 4949, mutual as in SCRAM (RFC 5802), without the salting
that protects passwords chosen by people: secrets here are random.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets

import msgspec

from phalanx.errors import HandshakeError

PROTOCOL_VERSION = 1
"""Incremented whenever old and new tasks would misunderstand each other."""

MAGIC = b"PHALANX" + bytes([PROTOCOL_VERSION])
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_OPENING_BYTES = len(MAGIC) + NONCE_BYTES


class Role(enum.Enum):
    """One end of the handshake, with the prefix of its proof."""

    DIALER = b"phalanx dialer"
    LISTENER = b"phalanx listener"


class WrongSecretError(HandshakeError):
    """The other end does not know this end's secret."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a connection: the dialling task and its purpose.

    Attributes:
        purpose: names the service that gets the link, for example `mesh`.
        task: the dialling task, for example `worker/1`.
        job: the dialer's job; tasks of another job are refused.
        incarnation: random, one for each process, to distinguish two processes of one task.
        details: data of the purpose, in its own encoding.
    """

    purpose: str
    task: str
    job: str = ""
    incarnation: str = ""
    details: bytes = b""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a Hello: empty `refusal` if the link is accepted.

    Attributes:
        refusal: the kind of refusal, a constant that both ends of the purpose know.
        reason: an explanation for people.
        details: data of the purpose, in its own encoding.
    """

    refusal: str = ""
    reason: str = ""
    details: bytes = b""


class Handshake:
    """One end of the handshake.

    The owner of the connection sends the result of `data_to_send()`, reads at most `bytes_needed()` bytes and passes
    them to `receive_data()`, until `done`.

    Args:
        role: which end this is.
        secret: the job's secret; None is proved like any other secret.
        nonce: this end's random number; drawn if not given.
    """

    def __init__(self, role: Role, secret: bytes | None, *, nonce: bytes | None = None):
        self._role = role
        self._secret = secret or b""
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._incoming = b""
        self._outgoing = self._opening() if role is Role.DIALER else b""
        self.done = False

    def data_to_send(self) -> bytes:
        """Bytes to send now; each byte is returned once."""
        data, self._outgoing = self._outgoing, b""
        return data

    def bytes_needed(self) -> int:
        """How many bytes the current message still needs; 0 when the handshake is done."""
        if self.done:
            return 0
        return (PROOF_BYTES if self._peer_nonce else _OPENING_BYTES) - len(self._incoming)

    @property
    def waits_for_proof(self) -> bool:
        """Whether the other end speaks this protocol, but has not proved the secret yet."""
        return bool(self._peer_nonce) and not self.done

    def receive_data(self, data: bytes) -> None:
        """Process bytes from the other end, at most `bytes_needed()`.

        Raises:
            WrongSecretError: it does not know the secret.
            HandshakeError: it does not speak this version of this protocol.
        """
        assert len(data) <= self.bytes_needed()
        self._incoming += data
        if not self._peer_nonce:
            check_opening(self._incoming)
        if self.bytes_needed():
            return
        message, self._incoming = self._incoming, b""
        if not self._peer_nonce:
            self._peer_nonce = message[len(MAGIC) :]
            self._outgoing += self._opening() if self._role is Role.LISTENER else self._proof(self._role)
            return
        other = Role.DIALER if self._role is Role.LISTENER else Role.LISTENER
        if not hmac.compare_digest(message, self._proof(other)):
            raise WrongSecretError(
                "it has another secret: PHALANX_SECRET differs, or is set at only one of the two ends"
            )
        if self._role is Role.LISTENER:
            self._outgoing += self._proof(self._role)
        self.done = True

    def _opening(self) -> bytes:
        return MAGIC + self._nonce

    def _proof(self, role: Role) -> bytes:
        nonces = (self._nonce, self._peer_nonce)
        dialer, listener = nonces if self._role is Role.DIALER else reversed(nonces)
        return hmac.digest(self._secret, role.value + MAGIC + dialer + listener, "sha256")


def check_opening(data: bytes) -> None:
    """Raise HandshakeError as soon as the first bytes of a connection cannot be this protocol's."""
    head = data[: len(MAGIC)]
    if MAGIC.startswith(head):
        return
    name = MAGIC[:-1]
    if head[: len(name)] == name:
        raise HandshakeError(
            f"it speaks version {head[-1]} of Phalanx's protocol and this task version {PROTOCOL_VERSION}: "
            f"install the same version of Phalanx everywhere"
        )
    raise HandshakeError(describe_stranger(data))


def describe_stranger(data: bytes) -> str:
    """Describe a connection that does not speak this protocol, judging by its first bytes."""
    start = data[:8]
    if start.split(b" ")[0] in {b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"DELETE", b"PRI"}:
        return f"it is an HTTP client (it sent {data[:24]!r}), perhaps a browser or a health check"
    if start[:2] in (b"\x16\x03", b"\x15\x03"):
        return (
            "it speaks TLS and this task does not: PHALANX_TLS_CERT, _KEY and _CA must be set on all tasks or on none"
        )
    if start[:4] == b"SSH-":
        return "it speaks SSH"
    return f"it does not speak Phalanx's protocol (it sent {bytes(start)!r}...)"
