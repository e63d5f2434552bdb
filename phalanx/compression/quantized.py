"""Quantization: few bits per value, and one scale per chunk of values."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from phalanx.collectives.communicator import Array, Communicator
from phalanx.compression.base_compression import Merged, State
from phalanx.compression.codec import Codec
from phalanx.compression.flat_arrays import pack_into, unpack_views
from phalanx.errors import ConfigurationError

CHUNK = 256
"""Number of values that share a scale. 4 bytes per 256 values add 1.6 % to 8 bits, and one large value coarsens only
its neighbors."""
SCALE_BYTES = 4


class _Quantized(Codec):
    """Rounds each value to the nearest integer multiple of its chunk's scale.

    Each rank decodes and sums one part of the values for all ranks, and encodes the sums to send them back, so that the
    bytes that a rank sends do not grow with the number of ranks. The rank that sums keeps the error of the second
    encoding with that of its own values (Tang et al. 2019, DoubleSqueeze).
    """

    bits: ClassVar[int]
    chunk: int

    def __post_init__(self) -> None:
        unit = 8 // math.gcd(8, self.bits)  # whole bytes
        if self.chunk < 1 or self.chunk % unit:
            raise ConfigurationError(
                f"{type(self).__name__} got chunk={self.chunk}; it must be a number of values of at least 1"
                f"{'' if unit == 1 else f' and a multiple of {unit}'}, for example {CHUNK}."
            )

    @classmethod
    @abstractmethod
    def _pack(cls, numbers: Array) -> Array:
        """Pack integers of shape (n,), int8, as bytes."""

    @classmethod
    @abstractmethod
    def _unpack(cls, packed: Array) -> Array:
        """Unpack the integers that `_pack` packed."""

    def all_reduce(self, communicator: Communicator, arrays: Sequence[Array], state: State) -> Merged:
        """See `Compression.all_reduce`: an all-to-all and an all-gather of codes."""
        ranks, rank = communicator.world_size, communicator.rank  # read now: they may change if a member is lost
        size = sum(array.size for array in arrays)
        share = -(-size // (ranks * self.chunk)) * self.chunk
        flat = np.zeros(ranks * share, np.float32)
        pack_into(flat, arrays)
        codes = self._encode_parts(flat, ranks)  # one for each rank, which sums this part of all ranks
        own = np.concatenate([self._decode_part(code) for code in codes])
        with np.errstate(all="ignore"):
            total = np.zeros(share, np.float32)
            for code in communicator.all_to_all(codes):
                total += self._decode_part(code)
            (code,) = self._encode_parts(total, 1)
            merged = np.concatenate([self._decode_part(part) for part in communicator.all_gather(code)])
            mine = slice(rank * share, (rank + 1) * share)
            # Only this rank knows the error of the second encoding of this part: add it to its error feedback.
            own[mine] += merged[mine] - total
        return Merged(unpack_views(merged, arrays), unpack_views(own, arrays), {})

    def encode(self, array: Array) -> Sequence[Array]:
        """See `Codec.encode`. Returns the values, uint8, and the scales of shape (chunks,), float32."""
        rows = np.zeros((-(-array.size // self.chunk), self.chunk), np.float32)
        rows.reshape(-1)[: array.size] = array
        largest = 2 ** (self.bits - 1) - 1
        # NaN and infinities make the scale, and so all decoded values of the chunk, NaN or infinite.
        scales = np.maximum(rows.max(axis=1), -rows.min(axis=1)) / np.float32(largest)
        # A chunk of zeros has scale 0, and decodes to 0 regardless of its codes.
        usable = np.isfinite(scales) & (scales > 0)
        with np.errstate(all="ignore"):
            rows /= np.where(usable, scales, 1)[:, None]
            np.rint(rows, out=rows)
            rows[~usable] = largest
            return [self._pack(rows.astype(np.int8).reshape(-1)), scales]

    def decode(self, parts: Sequence[Array], size: int) -> Array:
        """See `Codec.decode`."""
        packed, scales = parts
        decoded = self._unpack(packed).reshape(scales.size, self.chunk).astype(np.float32)
        with np.errstate(all="ignore"):
            decoded *= scales[:, None]
        return decoded.reshape(-1)[:size]

    def _encode_parts(self, values: Array, count: int) -> list[Array]:
        """Encode `count` equal parts of whole chunks, each as bytes: the values of the chunks, then their scales."""
        numbers, scales = self.encode(values)
        return [
            np.concatenate([part, own.view(np.uint8)])
            for part, own in zip(np.split(numbers, count), np.split(scales, count), strict=True)
        ]

    def _decode_part(self, code: Array) -> Array:
        """Decode one of the codes from `_encode_parts`."""
        of_chunk = self.chunk * self.bits // 8
        chunks = code.size // (of_chunk + SCALE_BYTES)
        scales = code[chunks * of_chunk :].copy().view(np.float32)  # copied, because they may start at any byte
        return self.decode([code[: chunks * of_chunk], scales], chunks * self.chunk)


@dataclass(frozen=True)
class Int8(_Quantized):
    """Encodes each value as round(127 x / m), where m is the largest magnitude of its chunk: a quarter of the bytes.

    Args:
        chunk: Number of values that share a scale.
    """

    bits: ClassVar[int] = 8
    chunk: int = CHUNK

    @classmethod
    def _pack(cls, numbers: Array) -> Array:
        return numbers.view(np.uint8)

    @classmethod
    def _unpack(cls, packed: Array) -> Array:
        return packed.view(np.int8)


@dataclass(frozen=True)
class Int6(_Quantized):
    """Encodes each value as round(31 x / m), where m is the largest magnitude of its chunk: 3/16 of the bytes.

    Args:
        chunk: Number of values that share a scale; a multiple of 4.
    """

    bits: ClassVar[int] = 6
    chunk: int = CHUNK

    @classmethod
    def _pack(cls, numbers: Array) -> Array:
        """Pack four integers into three bytes, the first one in the lowest bits."""
        first, second, third, fourth = (numbers.view(np.uint8) & 0x3F).reshape(-1, 4).T
        packed = np.empty((len(first), 3), np.uint8)
        packed[:, 0] = first | (second << 6)
        packed[:, 1] = (second >> 2) | (third << 4)
        packed[:, 2] = (third >> 4) | (fourth << 2)
        return packed.reshape(-1)

    @classmethod
    def _unpack(cls, packed: Array) -> Array:
        low, middle, high = packed.reshape(-1, 3).T
        numbers = np.empty((len(low), 4), np.uint8)
        # Each in the upper bits of a byte, so that the final right shift extends its sign.
        numbers[:, 0] = low << 2
        numbers[:, 1] = ((low >> 6) | (middle << 2)) << 2
        numbers[:, 2] = ((middle >> 4) | (high << 4)) << 2
        numbers[:, 3] = high & 0xFC
        return numbers.view(np.int8).reshape(-1) >> 2


@dataclass(frozen=True)
class Int4(_Quantized):
    """Encodes each value as round(7 x / m), where m is the largest magnitude of its chunk: an eighth of the bytes.

    Args:
        chunk: Number of values that share a scale; an even number.
    """

    bits: ClassVar[int] = 4
    chunk: int = CHUNK

    @classmethod
    def _pack(cls, numbers: Array) -> Array:
        """Pack two integers into a byte, the first one in the lower bits."""
        low, high = numbers[::2].view(np.uint8), numbers[1::2].view(np.uint8)
        packed: Array = (low & 0xF) | (high << 4)
        return packed

    @classmethod
    def _unpack(cls, packed: Array) -> Array:
        numbers = np.empty(2 * packed.size, np.int8)
        numbers[::2] = (packed << 4).view(np.int8) >> 4
        numbers[1::2] = packed.view(np.int8) >> 4
        return numbers
