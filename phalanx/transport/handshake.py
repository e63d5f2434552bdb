"""The handshake: both ends of a connection prove that they know the job's secret. Bytes in, bytes out.

    dialer    -> listener   8 bytes magic with the protocol's version, 1 byte of wishes, 32 bytes ephemeral public key
    listener  -> dialer     the same
    dialer    -> listener   32 bytes proof
    listener  -> dialer     32 bytes proof

All messages have a fixed length, so nothing that a stranger sends is interpreted or causes an allocation. The dialer
proves first: a connection without the secret receives only random numbers.

The proofs and the keys of the connection (`phalanx.transport.encryption`) are derived from the secret, the
Diffie-Hellman agreement of the two ephemeral keys, and both openings. They are therefore useless in another connection,
in the other direction, or after a change to either opening, and anyone who obtains the secret later cannot read earlier
recordings. Each end may request encryption; the connection is encrypted if either does.

Then each end sends one frame, `Hello` and `Welcome`, under these keys, and the link goes to the service of its purpose.
The Hello names both tasks: a proof that is relayed to a different task than the dialer meant opens no service there.

Source: the PSK mode with ephemeral keys of TLS 1.3 (RFC 8446, 2.2 and 4.2.9), with X25519 (RFC 7748) and HKDF-SHA256
(RFC 5869), without the salting that protects passwords chosen by people: secrets here are random.
"""

from __future__ import annotations

import enum
import hashlib
import hmac

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from phalanx.errors import HandshakeError
from phalanx.transport.encryption import KEY_BYTES, SessionKeys

PROTOCOL_VERSION = 2
"""Incremented whenever old and new tasks would misunderstand each other."""

MAGIC = b"PHALANX" + bytes([PROTOCOL_VERSION])
PUBLIC_KEY_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

OPENING_BYTES = len(MAGIC) + 1 + PUBLIC_KEY_BYTES
_NO_WISHES, _ENCRYPT = 0, 1


class Role(enum.Enum):
    """One end of the handshake."""

    DIALER = "dialer"
    LISTENER = "listener"


class WrongSecretError(HandshakeError):
    """The other end does not know this end's secret."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a connection: the dialing task and its purpose.

    Attributes:
        purpose: Name of the service that gets the link, for example `mesh`.
        task: Dialing task, for example `worker/1`.
        peer: Task that the dialer means to reach; other tasks refuse.
        job: Job of the dialer; tasks of another job are refused.
        incarnation: Random ID of each process, to distinguish processes of one task.
        details: Data of the purpose, in its own encoding.
    """

    purpose: str
    task: str
    peer: str
    job: str = ""
    incarnation: str = ""
    details: bytes = b""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a Hello; `refusal` is empty if the link is accepted.

    Attributes:
        refusal: Kind of refusal, a constant shared by both ends of the purpose.
        reason: Human-readable explanation.
        details: Data of the purpose, in its own encoding.
    """

    refusal: str = ""
    reason: str = ""
    details: bytes = b""


class Handshake:
    """One end of the handshake.

    The owner of the connection sends the result of `data_to_send()`, reads at most `bytes_needed()` bytes and passes
    them to `receive_data()`, until `done`.

    Args:
        role: Role of this end.
        secret: The job's secret. None is proved like any other secret, but encrypts nothing.
        encrypt: Whether this end asks for encryption.

    Attributes:
        done: Whether the other end has proved the secret.
        keys: Keys of the connection, once `done`; None if it is not encrypted.
    """

    def __init__(self, role: Role, secret: bytes | None, *, encrypt: bool = True):
        self._role = role
        self._secret = secret or b""
        self._key = X25519PrivateKey.generate()
        # The proofs cover the requests of both ends, so no one in between can make them drop encryption.
        wishes = _ENCRYPT if encrypt and secret else _NO_WISHES
        self._opening = MAGIC + bytes([wishes]) + self._key.public_key().public_bytes_raw()
        self._incoming = b""  # the beginning of the message that is being received
        self._outgoing = self._opening if role is Role.DIALER else b""
        self._proofs: tuple[bytes, bytes] | None = None  # of this end and the other, once its opening has arrived
        self._agreed: SessionKeys | None = None
        self.done = False
        self.keys: SessionKeys | None = None

    def data_to_send(self) -> bytes:
        """Return the bytes to send now. Each byte is returned once."""
        data, self._outgoing = self._outgoing, b""
        return data

    def bytes_needed(self) -> int:
        """Return how many bytes the current message still needs; 0 when the handshake is done."""
        if self.done:
            return 0
        return (PROOF_BYTES if self._proofs else OPENING_BYTES) - len(self._incoming)

    @property
    def waits_for_proof(self) -> bool:
        """Whether the other end speaks this protocol, but has not proved the secret yet."""
        return self._proofs is not None and not self.done

    def receive_data(self, data: bytes) -> None:
        """Process bytes from the other end, at most `bytes_needed()`.

        Raises:
            WrongSecretError: The other end does not know the secret.
            HandshakeError: The other end does not speak this version of this protocol.
        """
        assert len(data) <= self.bytes_needed()
        self._incoming += data
        if self._proofs is None:
            # Checked before it is complete: many strangers send less than an opening and would stay until the deadline.
            check_opening(self._incoming)
        if self.bytes_needed():
            return
        message, self._incoming = self._incoming, b""
        if self._proofs is None:
            own, _ = self._proofs = self._agree(message)
            self._outgoing += self._opening if self._role is Role.LISTENER else own
            return
        own, others = self._proofs
        if not hmac.compare_digest(message, others):
            raise WrongSecretError(
                "it has another secret: PHALANX_SECRET differs, or is set at only one of the two ends"
            )
        if self._role is Role.LISTENER:
            self._outgoing += own  # only now: a dialer without the secret gets nothing that depends on it
        self.done, self.keys = True, self._agreed

    def _agree(self, other: bytes) -> tuple[bytes, bytes]:
        """Derive proofs and keys, now that both openings are known. Return this end's proof and the other's.

        Raises: HandshakeError for a public key that allows no agreement on a secret.
        """
        try:
            agreed = self._key.exchange(X25519PublicKey.from_public_bytes(other[-PUBLIC_KEY_BYTES:]))
        except ValueError as error:
            raise HandshakeError("its public key is invalid") from error
        is_dialer = self._role is Role.DIALER
        # Both ends must derive the same values: the dialer's opening comes first. The salt is the key of HKDF's
        # extraction, so that nothing can be derived from the agreement alone.
        openings = (self._opening, other) if is_dialer else (other, self._opening)
        length = 2 * (PROOF_BYTES + KEY_BYTES)  # four values of 32 bytes each
        derived = HKDF(SHA256(), length, salt=self._secret or None, info=b"".join(openings)).derive(agreed)
        dialers_proof, listeners_proof, to_listener, to_dialer = (derived[at : at + 32] for at in range(0, length, 32))
        if (self._opening[len(MAGIC)] | other[len(MAGIC)]) & _ENCRYPT and self._secret:
            self._agreed = SessionKeys(to_listener, to_dialer) if is_dialer else SessionKeys(to_dialer, to_listener)
        return (dialers_proof, listeners_proof) if is_dialer else (listeners_proof, dialers_proof)


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
