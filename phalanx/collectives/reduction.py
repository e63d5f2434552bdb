"""The arithmetic of reductions, on plain arrays: no process, socket or clock.

All communicators reduce with these functions, so that they agree on the numbers:

- Rows are merged one after another in the given order, which is the same on every rank.
- Floats of 16 bits or fewer are staged, scaled and merged as float32 (the *wire* dtype) and rounded once at the end: a
  sum of bfloat16 that is rounded after each of 64 terms keeps barely one digit.
- Integers wrap around, as in NumPy. Booleans merge by `or` (SUM, MAX) and `and` (PRODUCT, MIN), as with NumPy's ufuncs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.half_precision import from_half, to_half
from phalanx.errors import ConfigurationError

DType = np.dtype[Any]

UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}

_FLOAT16, _FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
_MANY = 64
"""Number of values from which `half_precision` is faster than NumPy."""
_NARROW_BYTES = 2


def is_float(dtype: DType) -> bool:
    """Whether the dtype is a float, including those of ml_dtypes (bfloat16, float8_*).

    NumPy reports the latter as void (`kind == "V"`), but their scalar types are not `np.void`, and they can be cast to
    float32.
    """
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.type is not np.void and "float" in dtype.name)


def wire_dtype(dtype: DType) -> DType:
    """Dtype in which values are staged and merged: float32 for floats of up to 16 bits, else unchanged."""
    return _FLOAT32 if is_float(dtype) and dtype.itemsize <= _NARROW_BYTES else dtype


def check_reducible(dtype: DType, op: ReduceOp) -> None:
    """Raise ConfigurationError unless arrays of this dtype can be merged by `op`."""
    if not (is_float(dtype) or dtype.kind in "iub"):
        raise ConfigurationError(
            f"cannot all-reduce an array of dtype {dtype}: floats, integers and booleans can be merged. "
            f"Pass its numeric parts as separate arrays."
        )
    if op is ReduceOp.MEAN and not is_float(dtype):
        # tf.distribute would return float64 here, and Horovod would round down. Both are surprising.
        raise ConfigurationError(
            f"the mean of {dtype} values is in general not a {dtype}. Cast the array to a float dtype first, "
            f"or use SUM and divide."
        )


def load(source: Array, scale: float, target: Array) -> None:
    """Write `scale * source` to `target` (equal shapes; `target` has the wire dtype of `source`).

    With scale 0, the source is not read, so its NaN and infinite values do not matter.
    """
    if scale == 1.0:
        _assign(target, source)
    elif scale == 0.0:
        target.fill(0)
    elif source.dtype == target.dtype:  # floats: integers have the factor 0 or 1, see `argument_checks.scale_factors`
        np.multiply(source, scale, out=target)
    else:
        _assign(target, source)
        np.multiply(target, scale, out=target)


def merge_rows(rows: Sequence[Array], out: Array, op: ReduceOp, divisor: int = 1) -> None:
    """Merge equal-shaped rows of the wire dtype in order, divide by `divisor`, and store the result in `out`.

    `out` may have a narrower dtype (values are rounded once). It may be the first row itself, but no other row.
    """
    ufunc = UFUNCS[op]
    first = rows[0]
    target = out if out.dtype == first.dtype else np.empty_like(first)  # rounded only after the last row
    if len(rows) == 1:
        target[...] = first  # has its dtype
    else:
        ufunc(first, rows[1], out=target)
        for row in rows[2:]:
            ufunc(target, row, out=target)
    if divisor != 1 or target is not out:
        finish(target, out, divisor)


def finish(merged: Array, out: Array, divisor: int = 1) -> None:
    """Divide the merged values and store them in `out` (often the same array). `merged` is overwritten."""
    if divisor != 1:
        np.divide(merged, divisor, out=merged)
    if merged is not out:
        _assign(out, merged)


def cast(array: Array, dtype: DType) -> Array:
    """Return the array in this dtype; the array itself if it already has it."""
    if array.dtype == dtype:
        return array
    if array.size >= _MANY and (array.dtype, dtype) == (_FLOAT16, _FLOAT32):
        return from_half(array)
    if array.size >= _MANY and (array.dtype, dtype) == (_FLOAT32, _FLOAT16):
        return to_half(array)
    return array.astype(dtype)


def _assign(target: Array, source: Array) -> None:
    # Assignment casts like np.copyto(casting="unsafe"), at half the cost for a small array.
    target[...] = cast(source, target.dtype) if _FLOAT16 in (source.dtype, target.dtype) else source
