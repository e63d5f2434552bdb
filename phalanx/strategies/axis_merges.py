"""`strategy.reduce` and `strategy.gather` along axes of the values, over all replicas, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.reduction import wire_dtype
from phalanx.engines.tensors import Shape
from phalanx.errors import ConfigurationError
from phalanx.training.joint_batches import all_gather_rows
from phalanx.training.replica import Replica


def reduce_global(value: Any, op: ReduceOp, axes: tuple[int, ...]) -> Any:
    """Reduce a global array along some of its axes."""
    names = {ReduceOp.MAX: "max", ReduceOp.MIN: "min", ReduceOp.PRODUCT: "prod", ReduceOp.MEAN: "mean"}
    return getattr(keras.ops, names.get(op, "sum"))(value, axis=axes)


def reduce_along(replica: Replica, op: ReduceOp, arrays: list[Array], axes: tuple[int, ...]) -> list[Array]:
    """Reduce each array along some of its axes, over all replicas."""
    for array in arrays:
        if not all(-array.ndim <= axis < array.ndim for axis in axes):
            raise ConfigurationError(
                f"reduce() got axis={axes[0] if len(axes) == 1 else axes} for a value of shape {array.shape}, which "
                f"has no such axis. Pass axis=None to reduce over the replicas alone."
            )
    communicator = replica.communicator
    # Reduce locally in the dtype in which ranks merge: NumPy adds halves one by one, and such sums stop growing at 256.
    wide = [array.astype(wire_dtype(array.dtype), copy=False) for array in arrays]
    if op is ReduceOp.MEAN:
        # Sums and counts, not means: replicas may have different numbers of elements. Counts are exact in int64.
        sums = [array.sum(axis=axes, dtype=array.dtype) for array in wide]
        counts = [_elements(array.shape, axes) for array in wide]
        merged = communicator.all_reduce([*sums, *counts])
        pairs = zip(merged[: len(sums)], merged[len(sums) :], arrays, strict=True)
        return [np.asarray(total / count[0]).astype(array.dtype) for total, count, array in pairs]
    along: Callable[..., Any] = getattr(np, {ReduceOp.PRODUCT: "prod"}.get(op, op.value))
    # NumPy has no maximum of an empty array (unlike a sum or product), but a replica with an empty part must take part.
    empty = {ReduceOp.MAX: -np.inf, ReduceOp.MIN: np.inf}.get(op)
    local = [
        _neutral_element(array, axes, empty)
        if empty and not _elements(array.shape, axes)
        else np.asarray(along(array, axis=axes))
        for array in wide
    ]
    # NumPy sums small integers in int64, and booleans as numbers; the ranks merge in the dtype of the values.
    local = [value.astype(array.dtype, copy=False) for value, array in zip(local, wide, strict=True)]
    merged = communicator.all_reduce(local, op)
    return [total.astype(array.dtype, copy=False) for total, array in zip(merged, arrays, strict=True)]


def _elements(shape: Sequence[int], axes: tuple[int, ...]) -> Array:
    """The number of elements that are merged into one, with shape (1,)."""
    return np.array([math.prod(shape[axis] for axis in axes)], np.int64)


def _neutral_element(array: Array, axes: tuple[int, ...], value: float) -> Array:
    """The neutral element of a maximum (minimum) for an empty part: the least (greatest) value of its dtype."""
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        value = limits.min if value < 0 else limits.max
    if array.dtype.kind == "b":
        value = value > 0
    return np.full(np.delete(array.shape, axes), value, array.dtype)


def reduce_gradient(
    replica: Replica, op: ReduceOp, gradients: list[Array], shapes: list[tuple[int, ...]], axes: tuple[int, ...]
) -> list[Array]:
    """The gradient of `reduce_along`: the gradient of a sum is the gradient of each of its elements."""
    totals = replica.communicator.all_reduce(gradients)
    if op is ReduceOp.MEAN:
        counts = replica.communicator.all_reduce([_elements(shape, axes) for shape in shapes])
        totals = [(total / count[0]).astype(total.dtype) for total, count in zip(totals, counts, strict=True)]
    return [
        np.ascontiguousarray(np.broadcast_to(np.expand_dims(total, axes), shape))
        for total, shape in zip(totals, shapes, strict=True)
    ]


def gather_along(replica: Replica, array: Array, axis: int) -> Array:
    """Concatenate the values of all replicas along an axis."""
    if array.ndim == 0:
        raise ConfigurationError("gather() got a scalar, which has no axis to concatenate along. Give it shape (1,).")
    parts = all_gather_rows(np.moveaxis(array, axis, 0), replica.communicator)
    return np.ascontiguousarray(np.moveaxis(np.concatenate(parts), 0, axis))


def gather_gradient(replica: Replica, gradients: list[Array], shapes: list[tuple[int, ...]], axis: int) -> list[Array]:
    """The gradient of `gather_along`: the part of this replica's values in the sum of all replicas' gradients."""
    totals = replica.communicator.all_reduce(gradients)
    lengths = replica.communicator.all_gather(np.array([shape[axis] for shape in shapes], np.int64))
    # One start for each array. On rank 0, the sum over no ranks is a single 0, which `broadcast_to` repeats.
    starts = np.sum(lengths[: replica.rank], axis=0, dtype=np.int64)
    parts = []
    for total, shape, start in zip(totals, shapes, np.broadcast_to(starts, len(shapes)), strict=True):
        own = np.moveaxis(total, axis, 0)[start : start + shape[axis]]
        parts.append(np.ascontiguousarray(np.moveaxis(own, 0, axis)))
    return parts


def without_axes(shape: Shape, axes: tuple[int, ...]) -> Shape:
    """The shape without some of its axes."""
    gone = {axis % len(shape) for axis in axes if -len(shape) <= axis < len(shape)}  # the merge refuses others
    return [length for place, length in enumerate(shape) if place not in gone]


def with_unknown_axis(shape: Shape, axis: int) -> Shape:
    """The shape with the length of one axis unknown."""
    return [None if place in (axis, axis + len(shape)) else length for place, length in enumerate(shape)]
