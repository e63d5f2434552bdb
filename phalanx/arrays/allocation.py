"""Memory as training steps want it: what one frees stays with the process for the next, and blocks are aligned.

The C library gives large blocks back to the system at once, and every training step takes the same ones again,
page by page: thousands of page faults in a step of a small CNN on PyTorch, a quarter of its time. Thresholds of
mallopt(3).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.config.environment import process_environment

ALIGNMENT_BYTES = 64
"""XLA on CPU copies arguments that are aligned to less (a fifth of the time of a small model's step)."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
# So much may lie unused at the end of the heap before it is given back.
KEPT_BYTES = 512 * 1024**2
# The largest that glibc takes: larger blocks come from the system each time.
LARGEST_BLOCK_BYTES = 32 * 1024**2


def keep_freed_memory() -> None:
    """Raise the thresholds of glibc, unless the user has set its variables (MALLOC_..., GLIBC_TUNABLES)."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in process_environment()):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK_BYTES)


def empty_aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A new array, not initialised, at an address from which backends can compute without copying it. The dtype must be
    of plain numbers."""
    size = math.prod(shape) * dtype.itemsize
    block = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -block.ctypes.data % ALIGNMENT_BYTES
    return block[start : start + size].view(dtype).reshape(shape)


def copy_arrays(arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    return [array.copy() for array in arrays]


def zeros_aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """As `aligned`, and zero."""
    block = empty_aligned(shape, dtype)
    block.fill(0)
    return block
