"""Top-k sparsification: sends only the largest values, with their positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.collectives.communicator import Array
from phalanx.compression.codec import Codec
from phalanx.compression.quantized import Int8
from phalanx.errors import ConfigurationError

RATIO = 0.5
"""Share of the values that are sent, which takes a sixth of the bytes.

`docs/how-to/gradient-compression.md` describes its cost.
"""
POSITION_BITS = 32


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the largest `ratio` of each array's values by magnitude; the rest is kept as error feedback.

    Source: Stich, Cordonnier and Jaggi 2018, Sparsified SGD with memory. The positions take one bit for each value,
    or 32 bits for each value sent, whichever is less.

    Args:
        ratio: Share of values to send, above 0 and up to 1: ceil(ratio n) of n values.
        values: Codec of the values that are sent; None to send them in 32 bits.
    """

    ratio: float = RATIO
    values: Codec | None = field(default_factory=Int8)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigurationError(f"TopK got ratio={self.ratio}; it must be above 0 and at most 1, for example 0.1.")
        if self.values is not None and not isinstance(self.values, Codec):
            raise ConfigurationError(
                f"TopK got values={self.values!r}; it must be a phalanx.compression.Codec, such as Int8(), or None."
            )

    def encode(self, array: Array) -> Sequence[Array]:
        """See `Codec.encode`: the positions, uint8 or uint32; then the values, by ascending position."""
        count = math.ceil(self.ratio * array.size)
        # NaN counts as the largest value, so it is sent.
        positions = np.sort(np.argpartition(np.abs(array), array.size - count)[array.size - count :])
        chosen = array[positions]
        return [
            _bits(positions, array.size) if _is_dense(count, array.size) else positions.astype(np.uint32),
            *([chosen] if self.values is None else self.values.encode(chosen)),
        ]

    def decode(self, parts: Sequence[Array], size: int) -> Array:
        """See `Codec.decode`."""
        positions, *values = parts
        if positions.dtype == np.uint8:  # one bit per value; otherwise uint32. `encode` chooses by size alone.
            positions = np.flatnonzero(np.unpackbits(positions, count=size))
        decoded = np.zeros(size, np.float32)
        decoded[positions] = values[0] if self.values is None else self.values.decode(values, positions.size)
        return decoded


def _is_dense(count: int, size: int) -> bool:
    return POSITION_BITS * count > size


def _bits(positions: Array, size: int) -> Array:
    mask = np.zeros(size, np.bool_)
    mask[positions] = True
    return np.packbits(mask)
