"""Shared memory for the gradients and values of a worker on the server's host.

The message itself stays on the link, which defines the order: one side writes before it sends, the other reads after it
has received. Copying in memory takes a tenth of the time that sending the same bytes through the loopback interface
takes on both sides. There is one *place* for gradients: a worker sends only after its last gradients are answered, and
the server then keeps nothing of them. There are two places for values, used alternately: a worker reads the last values
while its next gradients are being sent.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.arrays import allocation
from phalanx.collectives.host.shared_segment import SegmentOffer, SharedSegment
from phalanx.errors import FrameError
from phalanx.parameter_server.shard_packing import Kind, kind_of, nbytes_of

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

METHODS = ("memfd", "/dev/shm")
"""Kinds of memory, the best first; see `collectives.host.shared_segment`."""
MIN_BYTES = 16 * 1024
"""Minimum size of shared arrays. Less is sent with the message, because it is in the cache either way."""
MAX_BYTES = 64 * 1024**2
"""Maximum size of a place: each worker and server has three of them, which take memory from other uses."""
SPARE_BYTES = 64 * 1024
"""Spare bytes for what is merged in addition to the gradients: metrics, statistics of layers."""
TO_SERVER, TO_WORKER = 0, 1
"""The first place for gradients, and for values."""
PLACES = 3
MAX_LAYOUTS = 16
"""Number of layouts of arrays to keep: each step has its own where single rows are sent."""


def place_bytes(lengths: Sequence[int]) -> int:
    """Number of bytes that buffers of these lengths take, each aligned as backends need it."""
    return sum(_aligned(length) for length in lengths)


class _PlacedArrays(NamedTuple):
    """Arrays in a place, and their lengths in bytes."""

    arrays: list[Array]
    lengths: tuple[int, ...]


class SharedMemoryChannel:
    """Memory shared by one worker and one server, as used by one of them."""

    def __init__(self, segment: SharedSegment):
        self._segment = segment
        self.place_bytes = segment.memory.nbytes // PLACES
        self._turn = 0  # the place for values that was written last
        # Last use of each place: from one step to the next, its contents have the same kinds.
        self._cut: dict[int, tuple[tuple[int, ...], list[memoryview]]] = {}
        self._layouts: dict[tuple[int, tuple[Kind, ...]], _PlacedArrays] = {}
        self._to_send = _PlacedArrays([], ())

    @classmethod
    def offer(cls, place: int, accepts: Callable[[SegmentOffer], bool]) -> SharedMemoryChannel | None:
        """Create memory with this many bytes per place, and some to spare, if the other side `accepts` it."""
        place = _aligned(place + SPARE_BYTES)
        if place > MAX_BYTES:
            return None
        for method in METHODS:
            try:
                segment = SharedSegment.create(PLACES * place, method)
            except OSError as error:
                logger.debug("no shared memory in %s: %s", method, error)
                continue
            try:
                if accepts(segment.offer):
                    return cls(segment)
            finally:
                segment.settle()
        return None

    @classmethod
    def accept(cls, offer: SegmentOffer) -> SharedMemoryChannel | None:
        """Map the memory that the other side offers; None if that is impossible here."""
        try:
            return cls(SharedSegment.open(offer))
        except (OSError, ValueError) as error:
            logger.debug("no shared memory at %s: %s", offer.path, error)
            return None

    def send_buffers(self, kinds: tuple[Kind, ...]) -> list[Array] | None:
        """Arrays of these kinds in the place that is sent next, to be filled. None if they are too small to be
        worthwhile, or do not fit. Unfilled arrays keep their contents, initially zero."""
        laid = self._lay(TO_SERVER, kinds)
        if laid is None:
            return None
        if laid is not self._to_send:  # the place had other contents
            for array in laid.arrays:
                array.fill(0)
            self._to_send = laid
        return laid.arrays

    def lengths_of(self, arrays: Sequence[Array]) -> tuple[int, ...]:
        """The arrays' lengths in bytes, if they are the last result of `send_buffers`; otherwise empty."""
        return self._to_send.lengths if arrays is self._to_send.arrays else ()

    def _lay(self, place: int, kinds: tuple[Kind, ...]) -> _PlacedArrays | None:
        laid = self._layouts.get((place, kinds))
        if laid is None:
            lengths = tuple(map(nbytes_of, kinds))
            if sum(lengths) < MIN_BYTES or place_bytes(lengths) > self.place_bytes:
                return None
            memories = self.read(place, lengths)
            arrays = [np.frombuffer(m, dtype).reshape(shape) for m, (shape, dtype) in zip(memories, kinds, strict=True)]
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            laid = self._layouts[place, kinds] = _PlacedArrays(arrays, lengths)
        return laid

    def _written(self, place: int, arrays: Sequence[Array]) -> _PlacedArrays | None:
        """Copy arrays into a place; None if they are too small or do not fit."""
        laid = self._lay(place, tuple(map(kind_of, arrays)))
        if laid is not None:
            for target, array in zip(laid.arrays, arrays, strict=True):
                # `copies` may have put the array at this address under another layout. NumPy then copies nothing.
                if target is not array:
                    np.copyto(target, array)
        return laid

    def copies(self, arrays: list[Array]) -> list[Array]:
        """Copies of values, if possible in the place that `write_values` writes next."""
        laid = self._written(TO_WORKER + 1 - self._turn, arrays)
        return allocation.copy_arrays(arrays) if laid is None else laid.arrays

    def write_values(self, arrays: Sequence[Array]) -> tuple[int, tuple[int, ...]]:
        """Copy values into the place whose turn it is, if they fit.

        Returns: the place, and the lengths in bytes. They are empty if nothing is written; the turn then stays, since
            the worker may still compute from the other place.
        """
        turn = 1 - self._turn
        laid = self._written(TO_WORKER + turn, arrays)
        if laid is not None:
            self._turn = turn
        return TO_WORKER + turn, () if laid is None else laid.lengths

    def read(self, place: int, lengths: Sequence[int]) -> list[memoryview]:
        """The buffers in a place, without a copy: they change when the place is written again.

        The caller must not change the list.

        Raises: FrameError if they cannot be there, since the other side's statement is checked.
        """
        known = self._cut.get(place)
        if known is not None and known[0] == lengths:
            return known[1]
        if not 0 <= place < PLACES or min(lengths) < 0 or place_bytes(lengths) > self.place_bytes:
            raise FrameError(f"buffers of {sum(lengths)} bytes in place {place} of {self.place_bytes} bytes")
        buffers, start = [], place * self.place_bytes
        for length in lengths:
            buffers.append(self._segment.memory[start : start + length])
            start += _aligned(length)
        self._cut[place] = tuple(lengths), buffers
        return buffers

    def close(self) -> None:
        """Unmap the memory as soon as no array refers to it. Safe to call twice."""
        self._cut.clear()
        self._layouts.clear()
        self._to_send = _PlacedArrays([], ())
        with contextlib.suppress(BufferError):
            self._segment.close()


def _aligned(length: int) -> int:
    return -(-length // allocation.ALIGNMENT_BYTES) * allocation.ALIGNMENT_BYTES
