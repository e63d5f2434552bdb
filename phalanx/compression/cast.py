"""Compression that sends gradients in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np

from phalanx.collectives.communicator import Array, Communicator
from phalanx.collectives.reduction import cast
from phalanx.compression.base_compression import DType, Merged, State
from phalanx.compression.flat_arrays import pack_into, unpack_views

_WIRE_ITEMSIZE = 2
"""Item size in bytes above which arrays are cast."""


class _Cast:
    """Rounds each rank's values once, sums them in float32, and rounds the sums once.

    An all-reduce of 16-bit arrays would send partial sums in float32. So this is a reduce-scatter, which sends each
    rank's values, and an all-gather of the sums: half the bytes both ways.
    """

    wire_dtype: ClassVar[DType]
    feedback: bool = False

    def takes(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """See `Compression.takes`: all arrays of more than 16 bits."""
        return dtype.itemsize > _WIRE_ITEMSIZE

    def all_reduce(self, communicator: Communicator, arrays: Sequence[Array], state: State) -> Merged:
        """See `Compression.all_reduce`."""
        world_size = communicator.world_size
        size = sum(array.size for array in arrays)
        # Row r is sent to rank r; zeros pad the last rows.
        whole = np.zeros((world_size, -(-size // world_size)), np.float32)
        with np.errstate(over="ignore"):  # Values out of range become infinite, as on GPUs.
            pack_into(whole.reshape(-1), arrays)
            rows = cast(whole, self.wire_dtype)
        share = communicator.reduce_scatter(rows)
        total = cast(np.concatenate(communicator.all_gather(share)), whole.dtype)
        own = unpack_views(cast(rows, whole.dtype).reshape(-1), arrays) if self.feedback else arrays
        return Merged(unpack_views(total, arrays), own, {})


@dataclass(frozen=True)
class Float16(_Cast):
    """IEEE half precision: 11 significant bits, from 6e-8 to 65504. Larger values become infinite.

    Args:
        feedback: Whether to keep the rounding error and add it in the next step.
    """

    wire_dtype: ClassVar[DType] = np.dtype(np.float16)
    feedback: bool = False


@dataclass(frozen=True)
class BFloat16(_Cast):
    """The upper half of float32: the same range, with 8 significant bits.

    Args:
        feedback: Whether to keep the rounding error and add it in the next step.
    """

    wire_dtype: ClassVar[DType] = np.dtype(ml_dtypes.bfloat16)
    feedback: bool = False
