"""Compressions that encode each array on its own; the ranks exchange the codes and sum the decoded arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import numpy as np

from phalanx.collectives.communicator import Array, Communicator
from phalanx.collectives.fusion_layout import byte_view
from phalanx.compression.base_compression import DType, Merged, State
from phalanx.errors import ConfigurationError, FrameError
from phalanx.transport.decoding import decode_message

SMALL = 1024
"""Size in elements below which arrays are not compressed: biases and scales are few and matter much."""


class Codec(ABC):
    """Base class of compressions with `encode` and `decode`. See `Compression`.

    Every rank receives every other rank's code (an all-gather) and sums the decoded arrays in rank order. The bytes
    that a rank sends therefore grow with the number of ranks, unlike those of an all-reduce.

    Example, gradients by their signs:

        class Signs(phalanx.compression.Codec):
            def encode(self, array):
                return [np.packbits(array > 0), np.mean(np.abs(array), keepdims=True)]

            def decode(self, parts, size):
                bits, magnitude = parts
                return np.where(np.unpackbits(bits, count=size), magnitude, -magnitude).astype("float32")
    """

    feedback = True

    @abstractmethod
    def encode(self, array: Array) -> Sequence[Array]:
        """Encode a flat float32 array as one or more arrays. Non-finite values must stay non-finite; see
        `Compression.all_reduce`."""

    @abstractmethod
    def decode(self, parts: Sequence[Array], size: int) -> Array:
        """Decode a code to a float32 array of `size` elements. Equal parts must give equal bits on every rank."""

    def takes(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """See `Compression.takes`: all arrays but small ones."""
        return int(np.prod(shape, dtype=np.int64)) >= SMALL

    def all_reduce(self, communicator: Communicator, arrays: Sequence[Array], state: State) -> Merged:
        """See `Compression.all_reduce`."""
        own_rank = communicator.rank  # Read now: it may change if a member is lost.
        codes = communicator.all_gather(_packed([self.encode(array.reshape(-1)) for array in arrays]))
        values: list[Array] = []
        own: list[Array] = []
        for rank, code in enumerate(codes):
            decoded = [
                self._decode(parts, array).reshape(array.shape)
                for parts, array in zip(_unpacked(code), arrays, strict=True)
            ]
            if rank == own_rank:
                own = decoded
            if not values:
                values = [array.copy() for array in decoded]  # not `decoded`, which is `own` on rank 0
            else:
                for total, array in zip(values, decoded, strict=True):
                    total += array
        return Merged(values, own, {})

    def _decode(self, parts: Sequence[Array], array: Array) -> Array:
        try:
            decoded = np.asarray(self.decode(parts, array.size))
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            raise FrameError(f"{type(self).__name__} cannot decode what another rank sent: {error}") from error
        if decoded.shape != (array.size,) or decoded.dtype != np.float32:
            raise ConfigurationError(
                f"{type(self).__name__}.decode returned {decoded.dtype.name} of shape {decoded.shape}; it must return "
                f"float32 of shape ({array.size},)."
            )
        return decoded


def _packed(codes: Sequence[Sequence[Array]]) -> Array:
    """Pack all parts of all arrays as bytes, after a header with their dtypes and shapes."""
    arrays = [[np.ascontiguousarray(part) for part in parts] for parts in codes]
    header = msgspec.msgpack.encode([[(part.dtype.name, part.shape) for part in parts] for parts in arrays])
    pieces = [len(header).to_bytes(4, "big"), header]
    return np.frombuffer(b"".join([*pieces, *[byte_view(part) for parts in arrays for part in parts]]), np.uint8)


def _unpacked(packed: Array) -> list[list[Array]]:
    """Unpack the parts from the result of `_packed`.

    Raises: FrameError if the bytes are something else.
    """
    try:
        return _unpack(packed)
    except (UnicodeError, TypeError, ValueError, SyntaxError, ZeroDivisionError, FrameError) as error:
        raise FrameError(f"Compressed gradients cannot be read: {error}") from error


def _unpack(packed: Array) -> list[list[Array]]:
    start = 4 + int.from_bytes(packed[:4].tobytes(), "big")
    header = decode_message(packed[4:start].tobytes(), list[list[tuple[str, tuple[int, ...]]]])
    found = []
    for described in header:
        parts = []
        for name, shape in described:
            dtype = np.dtype(name)
            if dtype.hasobject or dtype.subdtype is not None or min(shape, default=0) < 0:
                raise ValueError(f"{name!r} of shape {shape} is no array of numbers")
            stop = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            # A copy, because a part may start at any address, and some operations reject unaligned arrays.
            parts.append(packed[start:stop].copy().view(dtype).reshape(shape))
            start = stop
        found.append(parts)
    return found
