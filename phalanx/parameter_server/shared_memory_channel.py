"""Gradients and values of a worker on the server's own host: through memory that both have mapped.

What stays on the link is the message, and with it the order: one side writes before it sends, the other reads after it
has received. A copy in memory takes a tenth of what it takes to push the same bytes through the loopback interface, on
both sides together. The lane to the server has one place, because a worker sends when its last gradients have been
answered, and the server keeps nothing of them after that. The lane back has two in turn, because a worker reads the
last values while its next gradients are on their way.
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
"""Where lanes are made, the best first; see `collectives.segment`."""
MIN_BYTES = 16 * 1024
"""Less than this goes with the message: it is in the cache either way."""
MAX_BYTES = 64 * 1024**2
"""A larger place is not made: three of them for each worker and server would be missed elsewhere."""
SPARE_BYTES = 64 * 1024
"""For what is merged beside the gradients: metrics, statistics of layers."""
TO_SERVER, TO_WORKER = 0, 1
"""The first of the places of each lane."""
PLACES = 3
KNOWN = 16
"""Kinds of contents whose arrays are kept: where single rows travel, each step has its own."""


def place_bytes(lengths: Sequence[int]) -> int:
    """What a place must have for buffers of these lengths, each aligned as backends want it."""
    return sum(_aligned(length) for length in lengths)


class _Laid(NamedTuple):
    """Where arrays are in a place, and their lengths in bytes."""

    arrays: list[Array]
    lengths: tuple[int, ...]


class SharedMemoryChannel:
    """Both lanes between one worker and one server, seen from one of them."""

    def __init__(self, segment: SharedSegment):
        self._segment = segment
        self.place_bytes = segment.memory.nbytes // PLACES
        self._turn = 0
        # Of each place as it was last used: what is in it, from one step to the next, is of the same kinds.
        self._cut: dict[int, tuple[tuple[int, ...], list[memoryview]]] = {}
        self._laid: dict[tuple[int, tuple[Kind, ...]], _Laid] = {}
        self._to_send = _Laid([], ())

    @classmethod
    def offer(cls, place: int, accepts: Callable[[SegmentOffer], bool]) -> SharedMemoryChannel | None:
        """Make lanes with so many bytes to a place, and some to spare, if the other side `accepts` them; else None."""
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
        """Map what the other side has made; None if it is not to be had from here."""
        try:
            return cls(SharedSegment.open(offer))
        except (OSError, ValueError) as error:
            logger.debug("no shared memory at %s: %s", offer.path, error)
            return None

    def room(self, kinds: tuple[Kind, ...]) -> list[Array] | None:
        """Arrays of these kinds in the place whose contents are sent next, to be filled; None if that is too little to
        be worth it or too much to fit. What is not filled stays as it is, at first zero."""
        laid = self._lay(TO_SERVER, kinds)
        if laid is None:
            return None
        if laid is not self._to_send:  # others have been here
            for array in laid.arrays:
                array.fill(0)
            self._to_send = laid
        return laid.arrays

    def lengths_of(self, arrays: Sequence[Array]) -> tuple[int, ...]:
        """In bytes, if these are the arrays that `room` returned last; else none."""
        return self._to_send.lengths if arrays is self._to_send.arrays else ()

    def _lay(self, place: int, kinds: tuple[Kind, ...]) -> _Laid | None:
        laid = self._laid.get((place, kinds))
        if laid is None:
            lengths = tuple(map(nbytes_of, kinds))
            if sum(lengths) < MIN_BYTES or place_bytes(lengths) > self.place_bytes:
                return None
            memories = self.read(place, lengths)
            arrays = [np.frombuffer(m, dtype).reshape(shape) for m, (shape, dtype) in zip(memories, kinds, strict=True)]
            if len(self._laid) >= KNOWN:
                self._laid.clear()
            laid = self._laid[place, kinds] = _Laid(arrays, lengths)
        return laid

    def _written(self, place: int, arrays: Sequence[Array]) -> _Laid | None:
        """Arrays copied into a place; None if they are not for it."""
        laid = self._lay(place, tuple(map(kind_of, arrays)))
        if laid is not None:
            for room, array in zip(laid.arrays, arrays, strict=True):
                if room is not array:
                    np.copyto(room, array)
        return laid

    def copies(self, arrays: list[Array]) -> list[Array]:
        """Copies of values where `write_values` would write them next, if they are for it."""
        laid = self._written(TO_WORKER + 1 - self._turn, arrays)
        return allocation.copy_arrays(arrays) if laid is None else laid.arrays

    def write_values(self, arrays: Sequence[Array]) -> tuple[int, tuple[int, ...]]:
        """Copy values into the place whose turn it is; returns it, and their lengths in bytes: none if they are not
        for it. Where nothing is written, the turn stays: the worker may still compute from the other place."""
        turn = 1 - self._turn
        laid = self._written(TO_WORKER + turn, arrays)
        if laid is not None:
            self._turn = turn
        return TO_WORKER + turn, () if laid is None else laid.lengths

    def read(self, place: int, lengths: Sequence[int]) -> list[memoryview]:
        """The buffers that were written there, in the memory itself: they change when the place is written again. The
        list is not the caller's to change.

        Raises: FrameError if that cannot be: what the other side says is not believed.
        """
        known = self._cut.get(place)
        if known is not None and known[0] == lengths:
            return known[1]
        if not 0 <= place < PLACES or min(lengths) < 0 or place_bytes(lengths) > self.place_bytes:
            raise FrameError(f"buffers of {sum(lengths)} bytes in place {place} of lanes of {self.place_bytes} bytes")
        buffers, start = [], place * self.place_bytes
        for length in lengths:
            buffers.append(self._segment.memory[start : start + length])
            start += _aligned(length)
        self._cut[place] = tuple(lengths), buffers
        return buffers

    def close(self) -> None:
        """Unmap, as soon as nobody looks at the memory any more. Safe to call twice."""
        self._cut.clear()
        self._laid.clear()
        self._to_send = _Laid([], ())
        with contextlib.suppress(BufferError):
            self._segment.close()


def _aligned(length: int) -> int:
    return -(-length // allocation.ALIGNMENT_BYTES) * allocation.ALIGNMENT_BYTES
