"""Frames: what is put in comes out, however the bytes are cut; what is no frame is refused before it
costs."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import FrameError
from phalanx.transport import frames
from phalanx.transport.frames import Frame, FrameReader, byte_view, encode_frame


def read(data: bytes, reader: FrameReader, step: int) -> tuple[list[Frame], int]:
    """Feed bytes in steps of at most `step`; the frames that came out, and the bytes that were taken."""
    found = []
    position = 0
    while position < len(data):
        wanted = reader.get_buffer()
        assert wanted.nbytes
        piece = data[position : position + min(step, wanted.nbytes)]
        wanted[: len(piece)] = piece
        position += len(piece)
        frame = reader.buffer_updated(len(piece))
        if frame is not None:
            found.append(frame)
    return found, position


@given(
    st.lists(st.tuples(st.binary(max_size=50), st.lists(st.binary(max_size=50), max_size=5)), max_size=4),
    st.integers(1, 200),
)
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(
    messages: list[tuple[bytes, list[bytes]]], step: int
) -> None:
    stream = b"".join(bytes(piece) for message in messages for piece in encode_frame(*message))
    found, _ = read(stream, FrameReader(), step)
    assert [(frame.header, [bytes(buffer) for buffer in frame.buffers]) for frame in found] == messages


def test_a_reader_never_asks_for_bytes_beyond_its_frame() -> None:
    stream = b"".join(map(bytes, encode_frame(b"header", [b"x" * 100]))) + b"raw bytes of a collective"
    reader = FrameReader()
    position = 0
    while True:
        wanted = reader.get_buffer()
        wanted[:] = stream[position : position + wanted.nbytes]
        position += wanted.nbytes
        if reader.buffer_updated(wanted.nbytes):
            break
    assert stream[position:] == b"raw bytes of a collective"
    assert reader.idle


@given(st.binary(min_size=12, max_size=400), st.integers(1, 50))
def test_random_bytes_are_refused_and_never_crash(data: bytes, step: int) -> None:
    with pytest.raises(FrameError, match="expected a frame"):
        read(data if data[:4] != frames.MAGIC else b"x" + data, FrameReader(), step)


@given(st.binary(max_size=200))
def test_random_bytes_after_a_right_magic_are_refused_or_awaited(data: bytes) -> None:
    reader = FrameReader(max_payload_bytes=1000)
    try:
        read(frames.MAGIC + data, reader, 7)
    except FrameError:
        return
    assert reader.get_buffer().nbytes <= frames.MAX_HEADER_BYTES + 8 * frames.MAX_BUFFERS


@pytest.mark.parametrize(("header_length", "count"), [(2**32 - 1, 0), (0, 2**32 - 1), (frames.MAX_HEADER_BYTES + 1, 0)])
def test_a_huge_length_is_refused_at_the_preamble(header_length: int, count: int) -> None:
    with pytest.raises(FrameError, match="at most"):
        read(struct.pack("!4sII", frames.MAGIC, header_length, count), FrameReader(), 100)


def test_a_huge_payload_is_refused_before_it_is_allocated() -> None:
    lengths = struct.pack("!QQ", 1, 2**64 - 1)
    with pytest.raises(FrameError, match="bytes of payload"):
        read(struct.pack("!4sII", frames.MAGIC, 0, 2) + lengths, FrameReader(), 100)
    with pytest.raises(FrameError, match="at most 10 are allowed"):
        read(b"".join(encode_frame(b"", [b"x" * 11])), FrameReader(max_payload_bytes=10), 100)


def test_what_is_over_the_limits_is_refused_at_the_sender() -> None:
    with pytest.raises(FrameError, match="to send"):
        encode_frame(b"x" * (frames.MAX_HEADER_BYTES + 1))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.array(3, np.float32),
        np.zeros((0, 3), np.int64),
        np.ones(3, ml_dtypes.bfloat16),
        np.array([True, False]),
    ],
    ids=str,
)
def test_arrays_of_any_dtype_and_shape_are_sent_without_a_copy(array: np.ndarray) -> None:
    view = byte_view(array)
    assert bytes(view) == array.tobytes()
    if array.size:
        assert np.shares_memory(np.frombuffer(view, np.uint8), array)


def test_an_array_that_would_need_a_copy_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        byte_view(np.zeros((4, 4))[:, 1])
