"""Checks a collective's arguments before any of them is sent: if a rank raised later, the others would hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.collectives.communicator import Array, ReduceOp
from phalanx.collectives.host.algorithm import Reduction
from phalanx.collectives.operation import Operation, describe_kind, kinds_of, prepare_all_reduce
from phalanx.collectives.reduction import is_float
from phalanx.errors import ConfigurationError


def native(array: Any) -> Array:
    """Convert an array to this host's byte order. Ranks compare dtypes by name, and backends support no other order."""
    own: Array = np.asarray(array)
    return own if own.dtype.isnative else own.astype(own.dtype.newbyteorder("="))


def native_without_objects(name: str, arrays: Sequence[Any]) -> list[Array]:
    """Convert arrays to this host's byte order. Raises ConfigurationError for arrays of Python objects."""
    checked = [native(array) for array in arrays]
    if any(array.dtype.hasobject for array in checked):
        raise ConfigurationError(
            f"{name} got an array of Python objects; nothing is pickled between tasks. Use arrays of "
            f"numbers, or the _bytes methods."
        )
    return checked


def prepare_reduction(
    arrays: Sequence[Array],
    op: ReduceOp,
    scale: float | Sequence[float],
    out: Sequence[Array] | None,
    world_size: int,
) -> tuple[Operation, Reduction, list[Array]]:
    """Return the operation, the reduction and the result arrays of an all-reduce. Raises ConfigurationError."""
    arrays = [native(array) for array in arrays]
    operation = prepare_all_reduce(op, kinds_of(arrays))
    results = output_arrays("all_reduce", arrays, out)
    reduction = Reduction(
        operation.layouts,
        [array.ravel() for array in arrays],  # copies arrays that are not contiguous
        [array.ravel() for array in results],  # views, because these are contiguous: writes reach the results
        scale_factors(arrays, op, scale),
        op,
        world_size if op is ReduceOp.MEAN else 1,
    )
    return operation, reduction, results


def scale_factors(arrays: Sequence[Array], op: ReduceOp, scale: float | Sequence[float]) -> list[float]:
    """Return the factor of each array; 1 for integers, which only a factor of 0 affects.

    Raises: ConfigurationError for a wrong number of factors, or for factors with an operation other than SUM.
    """
    if isinstance(scale, (int, float, np.number)):
        if scale == 1.0:
            return [1.0] * len(arrays)
        scales = [float(scale)] * len(arrays)
    else:
        scales = [float(factor) for factor in scale]
    if len(scales) != len(arrays):
        raise ConfigurationError(f"scale has {len(scales)} factors for {len(arrays)} arrays.")
    if op is not ReduceOp.SUM and any(factor != 1.0 for factor in scales):
        raise ConfigurationError(f"scale needs op SUM, not {op.name}.")
    return [
        factor if factor == 0.0 or is_float(array.dtype) else 1.0 for factor, array in zip(scales, arrays, strict=True)
    ]


def output_arrays(name: str, arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
    """Return the arrays that receive a collective's results: `out`, or new arrays.

    Args:
        name: Name of the collective, for messages.
        arrays: Inputs; outputs have the same shapes and dtypes.
        out: Outputs that the caller passed, if any.

    Raises: ConfigurationError for outputs of a different shape or dtype, or that are not contiguous.
    """
    if out is None:
        return [np.empty(array.shape, array.dtype) for array in arrays]
    if len(out) != len(arrays):
        raise ConfigurationError(f"{name} got {len(out)} arrays in out for {len(arrays)} inputs.")
    for index, (target, array) in enumerate(zip(out, arrays, strict=True)):
        if target.shape != array.shape or target.dtype != array.dtype:
            raise ConfigurationError(
                f"{name} got out[{index}] of {describe_kind((target.dtype, target.shape))} for an input of "
                f"{describe_kind((array.dtype, array.shape))}; they must be equal."
            )
        if not target.flags.carray:
            raise ConfigurationError(
                f"{name} got out[{index}] that is not contiguous or not writeable. Pass an array made with "
                f"np.empty, or none."
            )
    return list(out)


def check_root(root: int, world_size: int) -> None:
    """Raise ConfigurationError unless `root` is a rank."""
    if not 0 <= root < world_size:
        raise ConfigurationError(f"root is {root}; the ranks are 0 to {world_size - 1}.")


def check_all_to_all(arrays: Sequence[Array], world_size: int) -> None:
    """Raise ConfigurationError unless there is one array per rank, equal except for the first dimension."""
    if len(arrays) != world_size:
        raise ConfigurationError(
            f"all_to_all got {len(arrays)} arrays; it takes one for each of the {world_size} ranks."
        )
    kinds = {(array.dtype, array.ndim, array.shape[1:]) for array in arrays}
    if len(kinds) > 1 or arrays[0].ndim == 0:
        raise ConfigurationError(
            f"all_to_all got arrays {', '.join(describe_kind((array.dtype, array.shape)) for array in arrays)}; they "
            f"must have one dtype, at least one dimension, and may differ in the first one only."
        )
