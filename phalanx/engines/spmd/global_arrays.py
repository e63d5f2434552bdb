"""Arrays on all devices of a mesh, including those of other processes: created from and read into host memory."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Array = np.ndarray[Any, Any]


def fetch(array: Any) -> Array:
    """Copy the whole array into host memory. If other processes hold parts of it, all must call this."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        from jax.experimental import multihost_utils

        array = multihost_utils.process_allgather(array, tiled=True)
    return np.array(array)


def put_like(array: Any, value: Array) -> Any:
    """Put the value where the array is. All processes that hold parts of it must have the same value."""
    value = np.array(value, array.dtype)  # a copy: steps may donate it
    return jax.make_array_from_callback(value.shape, array.sharding, lambda index: value[index])


def put_part(part: Array, rows: int, sharding: Any) -> Any:
    """Create a global array from this process's part of its rows.

    Args:
        part: This process's rows, or all rows.
        rows: Number of rows of the global array.
        sharding: Sharding of the global array.
    """
    if jax.process_count() == 1:
        return jax.device_put(part, sharding)
    if not part.ndim or len(part) == rows:
        return jax.make_array_from_callback(part.shape, sharding, lambda index: part[index])
    return jax.make_array_from_process_local_data(sharding, part, (rows, *part.shape[1:]))
