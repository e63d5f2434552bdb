"""Encryption of a connection after its handshake, as records. Bytes in, bytes out: this file knows no socket.

    record     u32 length of the ciphertext, ciphertext with a tag of 16 bytes

Each direction has its own key. A record's nonce is its number in that direction, which is never sent. Records that were
changed, omitted, repeated, reordered or taken from another connection do not open. The length of a record is
authenticated as well. An attacker can only end the connection, which is a lost peer like any other.

The cipher is AES-256-GCM (RFC 5116). With the processor's AES instructions, sealing or opening a record takes 7 us for
64 KiB and less than 1 us for a small message. A key serves `RECORDS_OF_A_KEY` records and is then replaced by one
derived from it, as GCM's bounds require (RFC 8446, 5.5 and 7.2).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from phalanx.errors import FrameError
from phalanx.transport.throttle import first_bytes

KEY_BYTES = 32
TAG_BYTES = 16
MAX_PLAIN_BYTES = 1 << 16
"""Bytes of one record. Twice as many would be a few percent faster, but leave the processor's cache sooner."""
RECORDS_OF_A_KEY = 1 << 20
"""64 GiB at most: GCM's confidentiality bound for one key is about 2**38 bytes in such records."""

_LENGTH = struct.Struct("!I")
_MAX_RECORD_BYTES = MAX_PLAIN_BYTES + TAG_BYTES


class SessionKeys(NamedTuple):
    """The two keys of one end of a connection, `KEY_BYTES` each."""

    sending: bytes
    receiving: bytes


class _Cipher:
    """One direction: a key, and the number of records that it has served."""

    def __init__(self, key: bytes):
        self._key = key
        self._aead = AESGCM(key)
        self._count = 0

    def next(self) -> tuple[AESGCM, bytes]:
        """The cipher and the nonce of the next record."""
        # Both ends count the records of a direction, so they change keys at the same record without a message.
        # The count may restart because the key is new: GCM fails if a nonce repeats under one key.
        if self._count == RECORDS_OF_A_KEY:
            self._key = HKDFExpand(SHA256(), KEY_BYTES, b"phalanx next key").derive(self._key)
            self._aead, self._count = AESGCM(self._key), 0
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        return self._aead, nonce


class RecordWriter:
    """Seals bytes into records."""

    def __init__(self, key: bytes):
        self._cipher = _Cipher(key)

    def seal(self, pieces: Sequence[memoryview]) -> tuple[memoryview, int]:
        """Seal the first bytes of `pieces`, at most `MAX_PLAIN_BYTES`; return the record and their number.

        The record has used its nonce, so the caller must send all of it before the next one.
        """
        found = first_bytes(pieces, MAX_PLAIN_BYTES)
        plain = found[0] if len(found) == 1 else b"".join(found)  # a piece that fills the record is not copied
        size = len(plain)
        record = bytearray(_LENGTH.size + size + TAG_BYTES)
        _LENGTH.pack_into(record, 0, size + TAG_BYTES)
        view = memoryview(record)
        aead, nonce = self._cipher.next()
        aead.encrypt_into(nonce, plain, view[: _LENGTH.size], view[_LENGTH.size :])
        return view, size


class RecordReader:
    """Opens records. The caller writes into `get_buffer()`, reports the bytes with `buffer_updated`, and takes the
    bytes that `open` has opened.

    The buffer never extends beyond a record, so later bytes stay in the socket: a caller that waits for the socket
    after a message does not wait for bytes that have already been read.
    """

    def __init__(self, key: bytes):
        self._cipher = _Cipher(key)
        self._sealed = memoryview(bytearray(_LENGTH.size + _MAX_RECORD_BYTES))
        self._filled = 0
        self._end = _LENGTH.size  # end of the record, or of its length until that has arrived
        self._opened = memoryview(bytearray(MAX_PLAIN_BYTES))
        self._plain = self._opened[:0]  # opened bytes not yet taken; a view, so no other record is opened until then

    def get_buffer(self) -> memoryview:
        """Return the memory for the next bytes; never empty once `open` has returned False."""
        return self._sealed[self._filled : self._end]

    def buffer_updated(self, count: int) -> None:
        """Account for `count` bytes that were written to `get_buffer()`.

        Raises: FrameError for an invalid record length.
        """
        self._filled += count
        if self._filled == self._end == _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._sealed)
            # Reject empty records too, which no writer seals: taking 0 bytes would look like the end of the stream.
            if not TAG_BYTES < length <= _MAX_RECORD_BYTES:
                raise FrameError(f"a record of {length} bytes was announced; at most {_MAX_RECORD_BYTES} are allowed")
            self._end += length

    def open(self) -> bool:
        """Open the next record if all bytes of the previous one were taken. Return whether bytes can be taken.

        Raises: FrameError if the record is not what the other end sent.
        """
        if self._plain:
            return True
        if self._filled < self._end or self._end == _LENGTH.size:
            return False
        opened = self._opened[: self._end - _LENGTH.size - TAG_BYTES]
        aead, nonce = self._cipher.next()
        head, sealed = self._sealed[: _LENGTH.size], self._sealed[_LENGTH.size : self._end]
        # If the record does not open, the count stays one too high. No record follows: a FrameError closes the link.
        try:
            aead.decrypt_into(nonce, sealed, head, opened)
        except InvalidTag as error:
            raise FrameError("the data was changed on its way, or comes from another sender") from error
        self._filled, self._end, self._plain = 0, _LENGTH.size, opened
        return True

    def take(self, target: memoryview) -> int:
        """Move opened bytes to `target`, and return their number."""
        count = min(len(self._plain), len(target))
        target[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count
