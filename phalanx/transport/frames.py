"""Frames: the wire format of a link, as bytes in and frames out. This file knows no socket.

A frame is a small header (a description of the message, encoded by the layer above) and any number of raw buffers
(array contents), in this order, integers in network byte order:

    preamble   4 bytes magic, u32 length of the header, u32 number of buffers
    lengths    one u64 for each buffer
    header     the number of bytes given in the preamble
    buffers    one after another, without padding

Every length is checked against a limit before memory is allocated for it: the preamble bounds the table of lengths
and the header, and the sum of the lengths is checked before the first buffer is allocated. A header that claims 4 GB
costs only the twelve bytes of the preamble.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.errors import FrameError

Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]
"""Contiguous memory that can be sent as raw bytes without a copy."""

MAGIC = b"PXF\x01"
"""First bytes of every frame; the last byte is the version of this format."""

MAX_HEADER_BYTES = 1 << 23
"""8 MiB: headers describe, buffers carry the data. A model with 10,000 variables and its optimizer use a
quarter of it."""

MAX_BUFFERS = 1 << 16
"""65,536 buffers: more than the variables of any model, and their table of lengths takes only 512 KiB."""

MAX_PAYLOAD_BYTES = 1 << 36
"""64 GiB over all buffers of a frame: more than any message carries, and too small to overflow. Pass a smaller
`FrameReader(max_payload_bytes=...)` where a smaller bound is known."""

_PREAMBLE = struct.Struct("!4sII")
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: its header and its buffers, which belong to the receiver."""

    header: bytes
    buffers: list[memoryview]


def byte_view(buffer: Buffer) -> memoryview:
    """Return the bytes of a contiguous buffer as a flat view, without a copy.

    Raises: ValueError if the memory is not contiguous: the caller must copy it first.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError(
                f"cannot send an array of shape {buffer.shape} with strides {buffer.strides} without a copy: "
                f"it is not contiguous. Pass numpy.ascontiguousarray(array)."
            )
        # Via uint8, because NumPy exports no buffer of bfloat16, and memoryview cannot cast empty shapes.
        return buffer.reshape(-1).view(np.uint8).data
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise ValueError("cannot send a memoryview that is not contiguous without a copy")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def encode_frame(header: bytes, buffers: Sequence[Buffer] = ()) -> list[memoryview]:
    """Return the pieces of one frame in sending order. Buffers are not copied; empty pieces are left out.

    Raises: FrameError if the frame exceeds a limit, so that the sender fails and not the receiver.
    """
    views = [byte_view(buffer) for buffer in buffers]
    lengths = [view.nbytes for view in views]
    _check_limits(len(header), len(views), what="to send")
    _check_payload(lengths, MAX_PAYLOAD_BYTES, what="to send")
    prefix = b"".join(
        (
            _PREAMBLE.pack(MAGIC, len(header), len(views)),
            struct.pack(f"!{len(lengths)}Q", *lengths),
            header,
        )
    )
    return [memoryview(prefix), *(view for view in views if view.nbytes)]


class FrameReader:
    """Assembles frames from a stream of bytes, without a copy.

    The caller writes into `get_buffer()` and reports the number of bytes with `buffer_updated(n)`, until that returns
    a frame (compare `asyncio.BufferedProtocol`). The buffer never extends beyond the end of the frame, so bytes after
    a frame stay in the socket for the next reader.

    After a FrameError the position in the stream is lost, and the reader must not be used again.

    Args:
        max_payload_bytes: Largest accepted sum of buffer sizes.
    """

    def __init__(self, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES):
        self._max_payload_bytes = max_payload_bytes
        self._start()

    def _start(self) -> None:
        self._header: bytes | None = None  # None until the header and the table of lengths have arrived
        self._header_length = -1  # -1 until the preamble has arrived
        self._lengths: tuple[int, ...] = ()
        self._buffers: list[memoryview] = []
        self._target = memoryview(bytearray(_PREAMBLE.size))
        self._position = 0

    @property
    def idle(self) -> bool:
        """Whether the stream is between two frames."""
        return self._header_length < 0 and self._position == 0

    def get_buffer(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        return self._target[self._position :]

    def buffer_updated(self, count: int) -> Frame | None:
        """Account for `count` bytes that were written to `get_buffer()`.

        Returns: The frame if these bytes completed it, else None.
        Raises: FrameError if this is not a frame, or exceeds a limit.
        """
        self._position += count
        # A loop, because the next part may be empty and so complete at once: an empty header or an empty buffer.
        while self._position == self._target.nbytes:
            frame = self._advance()
            if frame is not None:
                self._start()
                return frame
        return None

    def _advance(self) -> Frame | None:
        """Interpret the completed part and allocate the next one."""
        if self._header_length < 0:
            magic, header_length, buffer_count = _PREAMBLE.unpack(self._target)
            if magic != MAGIC:
                raise FrameError(
                    f"expected a frame (starting with {MAGIC!r}) but got {magic!r}: the other end speaks "
                    f"another protocol or another version of Phalanx, or the stream is damaged."
                )
            _check_limits(header_length, buffer_count, what="announced")
            self._header_length = header_length
            self._lengths = (0,) * buffer_count  # only their number matters until the table has arrived
            self._open(memoryview(bytearray(buffer_count * _LENGTH_BYTES + header_length)))
        elif self._header is None:
            table_bytes = len(self._lengths) * _LENGTH_BYTES
            self._lengths = struct.unpack(f"!{len(self._lengths)}Q", self._target[:table_bytes])
            _check_payload(self._lengths, self._max_payload_bytes, what="announced")
            self._header = bytes(self._target[table_bytes:])
            self._open_next_buffer()
        else:
            self._buffers.append(self._target)
            self._open_next_buffer()
        if self._header is not None and len(self._buffers) == len(self._lengths):
            return Frame(self._header, self._buffers)
        return None

    def _open_next_buffer(self) -> None:
        if len(self._buffers) < len(self._lengths):
            # numpy.empty, because a bytearray would first be filled with zeros, a pass over all of the memory. This
            # way, pages are allocated as their bytes arrive, and not for bytes that are only announced.
            length = self._lengths[len(self._buffers)]
            try:
                self._open(np.empty(length, np.uint8).data)
            except MemoryError as error:
                raise FrameError(f"a buffer of {length} bytes was announced, for which there is no memory") from error

    def _open(self, target: memoryview) -> None:
        self._target = target
        self._position = 0


def _check_limits(header_length: int, buffer_count: int, *, what: str) -> None:
    if header_length > MAX_HEADER_BYTES:
        raise FrameError(
            f"frame {what} with a header of {header_length} bytes; at most {MAX_HEADER_BYTES} are allowed. "
            f"Put large contents into the frame's buffers."
        )
    if buffer_count > MAX_BUFFERS:
        raise FrameError(f"frame {what} with {buffer_count} buffers; at most {MAX_BUFFERS} are allowed.")


def _check_payload(lengths: Sequence[int], limit: int, *, what: str) -> None:
    total = sum(lengths)
    if total > limit:
        raise FrameError(f"frame {what} with {total} bytes of payload; at most {limit} are allowed.")
