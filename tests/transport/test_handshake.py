"""The handshake admits exactly the ends that know the secret, and reports why others are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import HandshakeError
from phalanx.transport.handshake import MAGIC, OPENING_BYTES, Handshake, Role, WrongSecretError, describe_stranger


def converse(dialer: Handshake, listener: Handshake, step: int = 1000) -> None:
    """Carry bytes back and forth until neither end has any."""
    ends = [dialer, listener]
    quiet = 0
    while quiet < 2:
        data = ends[0].data_to_send()
        quiet = 0 if data else quiet + 1
        while data:
            taken = min(step, ends[1].bytes_needed(), len(data))
            ends[1].receive_data(data[:taken])
            data = data[taken:]
        ends.reverse()


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("secret", [b"secret", None])
def test_two_ends_with_the_same_secret_are_done(secret: bytes | None, step: int) -> None:
    dialer, listener = Handshake(Role.DIALER, secret), Handshake(Role.LISTENER, secret)
    converse(dialer, listener, step)
    assert dialer.done
    assert listener.done
    assert dialer.bytes_needed() == listener.bytes_needed() == 0


@pytest.mark.parametrize(("one", "other"), [(b"secret", b"other"), (None, b"secret"), (b"secret", None)])
def test_another_secret_is_found_by_the_listener_which_has_proved_nothing_yet(
    one: bytes | None, other: bytes | None
) -> None:
    dialer, listener = Handshake(Role.DIALER, one), Handshake(Role.LISTENER, other)
    with pytest.raises(WrongSecretError, match="another secret"):
        converse(dialer, listener)
    assert listener.data_to_send() == b""
    assert not dialer.done
    assert dialer.waits_for_proof


def test_a_dialer_does_not_believe_a_listener_without_the_secret() -> None:
    dialer = Handshake(Role.DIALER, b"secret")
    dialer.receive_data(Handshake(Role.DIALER, b"").data_to_send())  # any public key
    with pytest.raises(WrongSecretError):
        dialer.receive_data(bytes(32))


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    """A stranger that repeats every message of the dialer to it does not pass for a listener."""
    dialer = Handshake(Role.DIALER, b"secret")
    dialer.receive_data(dialer.data_to_send())
    with pytest.raises(WrongSecretError):
        dialer.receive_data(dialer.data_to_send())


def test_a_recorded_conversation_cannot_be_played_again() -> None:
    dialer, listener = Handshake(Role.DIALER, b"secret"), Handshake(Role.LISTENER, b"secret")
    opening = dialer.data_to_send()
    listener.receive_data(opening)
    dialer.receive_data(listener.data_to_send())
    proof = dialer.data_to_send()
    again = Handshake(Role.LISTENER, b"secret")
    again.receive_data(opening)
    with pytest.raises(WrongSecretError):
        again.receive_data(proof)


def test_a_public_key_that_agrees_on_nothing_is_refused() -> None:
    """With an all-zero key both ends would derive what anyone can (RFC 7748, 6.1)."""
    listener = Handshake(Role.LISTENER, b"secret")
    with pytest.raises(HandshakeError, match="public key"):
        listener.receive_data(MAGIC + bytes(OPENING_BYTES - len(MAGIC)))


@pytest.mark.parametrize("secret", [b"secret", None])
@pytest.mark.parametrize("dialers", [True, False])
@pytest.mark.parametrize("listeners", [True, False])
def test_a_connection_is_encrypted_if_either_end_wishes_it(
    *, dialers: bool, listeners: bool, secret: bytes | None
) -> None:
    dialer = Handshake(Role.DIALER, secret, encrypt=dialers)
    listener = Handshake(Role.LISTENER, secret, encrypt=listeners)
    converse(dialer, listener)
    if secret is None or not (dialers or listeners):
        assert dialer.keys is listener.keys is None
    else:
        assert dialer.keys is not None
        assert listener.keys == dialer.keys[::-1]
        assert dialer.keys.sending != dialer.keys.receiving


def test_wishes_cannot_be_changed_on_their_way() -> None:
    dialer, listener = Handshake(Role.DIALER, b"secret"), Handshake(Role.LISTENER, b"secret", encrypt=False)
    opening = bytearray(dialer.data_to_send())
    opening[len(MAGIC)] = 0
    listener.receive_data(bytes(opening))
    dialer.receive_data(listener.data_to_send())
    with pytest.raises(WrongSecretError):
        listener.receive_data(dialer.data_to_send())


def test_another_version_of_the_protocol_is_named() -> None:
    listener = Handshake(Role.LISTENER, b"secret")
    with pytest.raises(HandshakeError, match="version 9 of Phalanx's protocol and this task version 2"):
        listener.receive_data(MAGIC[:-1] + b"\x09")


@pytest.mark.parametrize(
    ("data", "description"),
    [
        (b"GET / HTTP/1.1\r\n", "HTTP client"),
        (b"\x16\x03\x01\x02\x00", "speaks TLS"),
        (b"SSH-2.0-OpenSSH_9", "SSH"),
        (b"\xff\xff\xff\xff\xff", "does not speak Phalanx"),
    ],
)
def test_a_stranger_is_told_by_its_first_bytes(data: bytes, description: str) -> None:
    assert description in describe_stranger(data)
    with pytest.raises(HandshakeError, match=description):
        Handshake(Role.LISTENER, None).receive_data(data)


@given(st.binary(min_size=1, max_size=40))
def test_no_random_bytes_get_through(data: bytes) -> None:
    listener = Handshake(Role.LISTENER, b"secret")
    if MAGIC.startswith(data[: len(MAGIC)]):
        return
    with pytest.raises(HandshakeError):
        listener.receive_data(data)
    assert not listener.done
    assert listener.data_to_send() == b""
