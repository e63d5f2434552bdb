"""Moves bytes over a connected socket without blocking: as plain bytes, through TLS, or in encrypted records."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.transport.encryption import RecordReader, RecordWriter, SessionKeys

_MAX_PIECES = os.sysconf("SC_IOV_MAX")
"""Maximum number of buffers per sendmsg."""
_TLS_JOIN_BYTES = 16 * 1024
"""TLS has no sendmsg: small buffers are joined up to the size of one TLS record, larger ones are sent alone."""


class PlainWire:
    """Sends plain bytes. The other wires have the same attributes and methods.

    Attributes:
        is_encrypted: Whether the bytes are protected from being read or changed by others.
        is_in_record: Whether it has begun to send bytes that it has not counted as sent. Only these can follow.
        send_waits_for, receive_waits_for: Poll event after which a call that would have blocked may succeed. TLS may
            have to read in order to write.
    """

    is_encrypted = False
    is_in_record = False
    send_waits_for = select.POLLOUT
    receive_waits_for = select.POLLIN

    def __init__(self, sock: socket.socket):
        self._sock = sock

    def send(self, buffers: Sequence[memoryview]) -> int:
        """See `Link.try_send`. Raises: OSError, ValueError."""
        try:
            return self._sock.sendmsg(buffers[:_MAX_PIECES]) if buffers else 0
        except BlockingIOError:
            return 0

    def receive_into(self, buffer: memoryview) -> int | None:
        """Read bytes, and return their number: 0 at the end of the stream, None if it would block.

        Raises: OSError, ValueError; FrameError if the bytes are not what the other end sent.
        """
        try:
            return self._sock.recv_into(buffer)
        except BlockingIOError:
            return None


class TLSWire:
    """Sends through OpenSSL. It allows one call at a time, but one thread may send while another receives."""

    is_encrypted = True

    def __init__(self, sock: ssl.SSLSocket):
        self._sock = sock
        self._lock = threading.Lock()
        self.is_in_record = False
        self.send_waits_for = select.POLLOUT
        self.receive_waits_for = select.POLLIN

    def send(self, buffers: Sequence[memoryview]) -> int:
        piece = _first_piece(buffers)
        if not piece:
            return 0
        # A call that would block has already encrypted the piece: OpenSSL must then get the same bytes again, from any
        # address, and not fewer of them (CPython sets SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER, and no partial writes).
        # `_first_piece` ensures this if the same buffers are offered again, possibly with more after them.
        try:
            count = self._call(self._sock.send, piece)
            self.send_waits_for = select.POLLOUT
            self.is_in_record = False
            return count
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.send_waits_for = select.POLLOUT
        except ssl.SSLWantReadError:
            self.send_waits_for = select.POLLIN
        self.is_in_record = True
        return 0

    def receive_into(self, buffer: memoryview) -> int | None:
        try:
            return self._call(self._sock.recv_into, buffer)
        except BrokenPipeError:  # from a read: OpenSSL answers the end of stream with an alert, which is never read
            return 0
        except (BlockingIOError, ssl.SSLWantReadError):
            self.receive_waits_for = select.POLLIN
        except ssl.SSLWantWriteError:
            self.receive_waits_for = select.POLLOUT
        return None

    def _call(self, operation: Callable[[Any], int], buffer: memoryview | bytes) -> int:
        """Call OpenSSL, and retry if it fails with an error that may belong to another connection.

        A call that fails with an `errno` on a connection, including its release, leaves an error in the thread's queue.
        CPython finds it there when the next call on any connection would only block (python/cpython#148594).
        """
        # The socket is non-blocking, so neither direction waits long for the other.
        with self._lock:
            try:
                return operation(buffer)
            except (BlockingIOError, ssl.SSLError):  # an SSLError belongs to this connection
                raise
            except OSError as error:
                self._clear_error_queue()
                try:
                    return operation(buffer)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise
                except OSError:
                    raise error from None  # it belongs to this connection, and says more than its consequences

    def _clear_error_queue(self) -> None:
        """Clear the thread's error queue by creating an SSL object; Python has no other way."""
        self._sock.context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=self._sock.server_side)


class EncryptedWire:
    """Sends encrypted records; see `phalanx.transport.encryption`."""

    is_encrypted = True
    send_waits_for = select.POLLOUT
    receive_waits_for = select.POLLIN

    def __init__(self, sock: socket.socket, keys: SessionKeys):
        self._sock = sock
        self._writer = RecordWriter(keys.sending)
        self._reader = RecordReader(keys.receiving)
        # The part of the last record that the kernel has not accepted, and the number of bytes sealed in the record.
        self._unsent: tuple[memoryview, int] | None = None

    @property
    def is_in_record(self) -> bool:
        return self._unsent is not None

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Send bytes in records. They count as sent when the kernel has accepted their whole record."""
        total = 0
        buffers = skip_bytes(buffers, 0)
        while self._unsent or buffers:
            # Stored before sending: the peer can open no other record until it has all of this one.
            self._unsent = record, size = self._unsent or self._writer.seal(buffers)
            try:
                count = self._sock.send(record)
            except BlockingIOError:
                break
            if count < len(record):
                self._unsent = record[count:], size
                continue
            self._unsent = None
            total += size
            buffers = skip_bytes(buffers, size)
        return total

    def receive_into(self, buffer: memoryview) -> int | None:
        # `open` first: the rest of an earlier record may already be here, which the socket does not show.
        while not self._reader.open():
            try:
                count = self._sock.recv_into(self._reader.get_buffer())
            except BlockingIOError:
                return None
            if not count:
                return 0
            self._reader.buffer_updated(count)
        return self._reader.take(buffer)


Wire = PlainWire | TLSWire | EncryptedWire


def skip_bytes(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """The rest of `pieces` after their first `count` bytes, without empty pieces at the start."""
    for index, piece in enumerate(pieces):
        if count < piece.nbytes:
            return [piece[count:], *pieces[index + 1 :]]
        count -= piece.nbytes
    return []


def _first_piece(buffers: Sequence[memoryview]) -> memoryview | bytes:
    """Bytes of one TLS write: the first large piece, or as many small pieces as fit into a record."""
    joined: list[memoryview] = []
    size = 0
    for piece in buffers:
        if size + piece.nbytes > _TLS_JOIN_BYTES:
            break
        joined.append(piece)
        size += piece.nbytes
    if size:
        return joined[0] if len(joined) == 1 else b"".join(joined)
    return next((piece for piece in buffers if piece.nbytes), b"")
