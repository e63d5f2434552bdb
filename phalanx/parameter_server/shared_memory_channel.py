"""Shared memory for the gradients and values of a worker on the server's host.

The message itself stays on the link, which defines the order: one side writes before it sends, the other reads after it
has received. Copying in memory takes a tenth of the time that sending the same bytes through the loopback interface
takes on both sides. There is one *region* for gradients: a worker sends only after its last gradients are answered, and
the server then keeps nothing of them. There are two regions for values, used alternately: a worker reads the last
values while its next gradients are being sent.
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
"""Maximum size of a region: each worker and server has three of them, which take memory from other uses."""
SPARE_BYTES = 64 * 1024
"""Spare bytes for what is merged in addition to the gradients: metrics, statistics of layers."""
TO_SERVER, TO_WORKER = 0, 1
"""The first region for gradients, and for values."""
REGIONS = 3
MAX_LAYOUTS = 16
"""Number of layouts of arrays to keep: each step has its own where single rows are sent."""


def region_bytes(lengths: Sequence[int]) -> int:
    """Number of bytes that buffers of these lengths take, each aligned as backends need it."""
    return sum(_aligned(length) for length in lengths)


class _RegionArrays(NamedTuple):
    """Arrays in a region, and their lengths in bytes."""

    arrays: list[Array]
    lengths: tuple[int, ...]


class SharedMemoryChannel:
    """Memory shared by one worker and one server, as used by one of them."""

    def __init__(self, segment: SharedSegment):
        self._segment = segment
        self.region_bytes = segment.memory.nbytes // REGIONS
        self._last_written = 0  # which of the two regions for values
        # Last use of each region: from one step to the next, its contents have the same kinds.
        self._buffers: dict[int, tuple[tuple[int, ...], list[memoryview]]] = {}
        self._layouts: dict[tuple[int, tuple[Kind, ...]], _RegionArrays] = {}
        self._to_send = _RegionArrays([], ())

    @classmethod
    def offer(cls, nbytes: int, accepts: Callable[[SegmentOffer], bool]) -> SharedMemoryChannel | None:
        """Create memory with this many bytes per region, and some to spare, if the other side `accepts` it."""
        nbytes = _aligned(nbytes + SPARE_BYTES)
        if nbytes > MAX_BYTES:
            return None
        for method in METHODS:
            try:
                segment = SharedSegment.create(REGIONS * nbytes, method)
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
        """Arrays of these kinds in the region that is sent next, to be filled. None if they are too small to be
        worthwhile, or do not fit. Unfilled arrays keep their contents, initially zero."""
        layout = self._layout_for(TO_SERVER, kinds)
        if layout is None:
            return None
        if layout is not self._to_send:  # the region had other contents
            for array in layout.arrays:
                array.fill(0)
            self._to_send = layout
        return layout.arrays

    def lengths_of(self, arrays: Sequence[Array]) -> tuple[int, ...]:
        """The arrays' lengths in bytes, if they are the last result of `send_buffers`; otherwise empty."""
        return self._to_send.lengths if arrays is self._to_send.arrays else ()

    def _layout_for(self, region: int, kinds: tuple[Kind, ...]) -> _RegionArrays | None:
        layout = self._layouts.get((region, kinds))
        if layout is None:
            lengths = tuple(map(nbytes_of, kinds))
            if sum(lengths) < MIN_BYTES or region_bytes(lengths) > self.region_bytes:
                return None
            memories = self.read(region, lengths)
            arrays = [np.frombuffer(m, dtype).reshape(shape) for m, (shape, dtype) in zip(memories, kinds, strict=True)]
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[region, kinds] = _RegionArrays(arrays, lengths)
        return layout

    def _write(self, region: int, arrays: Sequence[Array]) -> _RegionArrays | None:
        """Copy arrays into a region; None if they are too small or do not fit."""
        layout = self._layout_for(region, tuple(map(kind_of, arrays)))
        if layout is not None:
            for target, array in zip(layout.arrays, arrays, strict=True):
                # `copy_values` may have put the array at this address under another layout. NumPy then copies nothing.
                if target is not array:
                    np.copyto(target, array)
        return layout

    def copy_values(self, arrays: list[Array]) -> list[Array]:
        """Copies of values, if possible in the region that `write_values` writes next."""
        layout = self._write(TO_WORKER + 1 - self._last_written, arrays)
        return allocation.copy_arrays(arrays) if layout is None else layout.arrays

    def write_values(self, arrays: Sequence[Array]) -> tuple[int, tuple[int, ...]]:
        """Copy values into the region that was not written last, if they fit.

        Returns: the region, and the lengths in bytes. They are empty if nothing is written; the next call then uses the
            same region, since the worker may still compute from the other one.
        """
        following = 1 - self._last_written
        layout = self._write(TO_WORKER + following, arrays)
        if layout is not None:
            self._last_written = following
        return TO_WORKER + following, () if layout is None else layout.lengths

    def read(self, region: int, lengths: Sequence[int]) -> list[memoryview]:
        """The buffers in a region, without a copy: they change when the region is written again.

        The caller must not change the list.

        Raises: FrameError if they cannot be there, since the other side's statement is checked.
        """
        known = self._buffers.get(region)
        if known is not None and known[0] == lengths:
            return known[1]
        if not 0 <= region < REGIONS or min(lengths) < 0 or region_bytes(lengths) > self.region_bytes:
            raise FrameError(f"buffers of {sum(lengths)} bytes in region {region} of {self.region_bytes} bytes")
        buffers, start = [], region * self.region_bytes
        for length in lengths:
            buffers.append(self._segment.memory[start : start + length])
            start += _aligned(length)
        self._buffers[region] = tuple(lengths), buffers
        return buffers

    def close(self) -> None:
        """Unmap the memory as soon as no array refers to it. Safe to call twice."""
        self._buffers.clear()
        self._layouts.clear()
        self._to_send = _RegionArrays([], ())
        with contextlib.suppress(BufferError):
            self._segment.close()


def _aligned(length: int) -> int:
    return -(-length // allocation.ALIGNMENT_BYTES) * allocation.ALIGNMENT_BYTES
