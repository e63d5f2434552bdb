"""Memory for training steps: freed blocks stay with the process for the next step, and arrays are aligned.

By default, the C library returns large blocks to the system at once, and every training step allocates them again, page
by page: thousands of page faults in a step of a small CNN on PyTorch, a quarter of its time. Raising the thresholds of
mallopt(3) avoids this.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.config.environment import process_environment

ALIGNMENT_BYTES = 64
"""Alignment below which XLA on CPU copies arguments, which takes a fifth of a small model's step."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
# Maximum unused memory that is kept at the end of the heap.
KEPT_BYTES = 512 * 1024**2
# The largest threshold that glibc accepts: larger blocks are always allocated from the system.
LARGEST_BLOCK_BYTES = 32 * 1024**2


def keep_freed_memory() -> None:
    """Raise the thresholds of glibc, unless the user has set its variables (MALLOC_..., GLIBC_TUNABLES)."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in process_environment()):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # missing in other C libraries
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK_BYTES)


def empty_aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A new uninitialized array, aligned so that backends can use it without a copy.

    Args:
        shape: Shape of the array.
        dtype: A numeric dtype.
    """
    size = math.prod(shape) * dtype.itemsize
    # The view below keeps `block` alive.
    block = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -block.ctypes.data % ALIGNMENT_BYTES
    return block[start : start + size].view(dtype).reshape(shape)


def aligned_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy an array of plain numbers, aligned so that backends can use it without another copy."""
    block = empty_aligned(array.shape, array.dtype)
    np.copyto(block, array)
    return block


def copy_arrays(arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Copy all arrays."""
    return [array.copy() for array in arrays]


def zeros_aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Like `empty_aligned`, filled with zeros."""
    block = empty_aligned(shape, dtype)
    block.fill(0)
    return block
