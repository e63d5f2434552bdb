"""Runs operations that all ranks have requested, with the communicator's collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.collectives.communicator import Communicator, ReduceOp
from phalanx.collectives.reduction import is_float, merge_rows, wire_dtype
from phalanx.horovod import adasum
from phalanx.horovod.operation_request import Array, HorovodOp, OperationKind, Request, dtype_of

_REDUCE_OPS = {
    HorovodOp.AVERAGE: ReduceOp.SUM,
    HorovodOp.SUM: ReduceOp.SUM,
    HorovodOp.MIN: ReduceOp.MIN,
    HorovodOp.MAX: ReduceOp.MAX,
    HorovodOp.PRODUCT: ReduceOp.PRODUCT,
}

_SCALED_BY_COMMUNICATOR = (HorovodOp.AVERAGE, HorovodOp.SUM)
"""Reductions in which the communicator multiplies while it adds."""


@dataclass(slots=True)
class OperationBuffers:
    """This rank's input and output of an operation.

    Attributes:
        arrays: The input.
        outs: Contiguous arrays for the result, possibly `arrays` themselves; None for new arrays.
        splits: Number of rows that an alltoall sends to each rank.
        result: A list with one array for each of `arrays`; for an alltoall, a list of the received rows and the number
            of rows from each rank (int32).
    """

    arrays: Sequence[Array]
    outs: Sequence[Array] | None = None
    splits: Sequence[int] = ()
    result: Any = None


@np.errstate(all="ignore")  # an overflow must not end the operation on one rank only
def execute(
    communicator: Communicator, requests: Sequence[Request], all_buffers: Sequence[OperationBuffers | None]
) -> None:
    """Run a batch of fused requests (`negotiation.fuse`); all ranks must call this with the same requests.

    Args:
        communicator: The communicator of the ranks.
        requests: Requests that differ only in their arrays.
        all_buffers: This rank's arrays for each request, which receive the results; None if the rank has joined and
            contributes neutral values.
    """
    kind = requests[0].kind
    if kind == OperationKind.ALLREDUCE:
        _allreduce(communicator, requests, all_buffers)
    elif kind == OperationKind.BROADCAST:
        _broadcast(communicator, requests, all_buffers)
    elif kind != OperationKind.BARRIER:
        (buffers,) = all_buffers
        assert buffers is not None, "other kinds are refused once a rank has joined"
        if kind == OperationKind.ALLGATHER:
            buffers.result = [np.concatenate(communicator.all_gather(array)) for array in buffers.arrays]
        elif kind == OperationKind.ALLTOALL:
            buffers.result = _alltoall(communicator, buffers)
        else:
            buffers.result = [_reducescatter(communicator, array, requests[0]) for array in buffers.arrays]


# -------------------------------------------------------------------------------------------------------- reductions


def _allreduce(
    communicator: Communicator, requests: Sequence[Request], all_buffers: Sequence[OperationBuffers | None]
) -> None:
    op, prescale, postscale = HorovodOp(requests[0].op), requests[0].prescale, requests[0].postscale
    arrays: list[Array] = []
    outs: list[Array] = []
    for request, buffers in zip(requests, all_buffers, strict=True):
        if buffers is None:
            # With the dtypes and shapes of the other ranks, or the communicator finds a mismatch.
            neutral = [
                _identity_array(op, dtype_of(name), shape)
                for name, shape in zip(request.dtypes, request.shapes, strict=True)
            ]
            arrays += neutral
            outs += neutral
        else:
            buffers.result = _output_arrays(buffers)
            is_scaled_here = op not in _SCALED_BY_COMMUNICATOR
            arrays += [_scale(array, prescale) for array in buffers.arrays] if is_scaled_here else buffers.arrays
            outs += buffers.result
    floats = [is_float(array.dtype) for array in arrays]
    if op is not HorovodOp.AVERAGE or len(set(floats)) < 2:
        _reduce(communicator, op, arrays, outs, prescale, postscale)
        return
    # Separately: integer means need sums, but a sum in half precision can overflow where the mean does not.
    for of_floats in (True, False):
        chosen = [index for index, each in enumerate(floats) if each is of_floats]
        _reduce(communicator, op, [arrays[i] for i in chosen], [outs[i] for i in chosen], prescale, postscale)


def _reduce(
    communicator: Communicator,
    op: HorovodOp,
    arrays: Sequence[Array],
    outs: Sequence[Array],
    prescale: float,
    postscale: float,
) -> None:
    """Reduce arrays into `outs`. For an average, they are all floats or all integers."""
    if op is HorovodOp.ADASUM:
        adasum.adasum(communicator, arrays, outs)
    elif op is HorovodOp.AVERAGE and all(is_float(array.dtype) for array in arrays):
        if prescale == 1.0:
            communicator.all_reduce(arrays, ReduceOp.MEAN, out=outs)
        else:
            communicator.all_reduce(arrays, ReduceOp.SUM, scale=[prescale] * len(arrays), out=outs)
            postscale /= communicator.world_size
    elif op is HorovodOp.AVERAGE:
        # The sums need separate arrays: `outs` have too few bits for them.
        sums = communicator.all_reduce([_widen(_scale(array, prescale)) for array in arrays], ReduceOp.SUM)
        for out, total in zip(outs, sums, strict=True):
            out[...] = _divide(total, communicator.world_size, postscale)
        return
    elif op is HorovodOp.SUM:
        scales = [prescale if is_float(array.dtype) else 1.0 for array in arrays]
        arrays = [array if is_float(array.dtype) else _scale(array, prescale) for array in arrays]
        communicator.all_reduce(arrays, ReduceOp.SUM, scale=scales if prescale != 1.0 else 1.0, out=outs)
    else:
        communicator.all_reduce(arrays, _REDUCE_OPS[op], out=outs)
    if postscale != 1.0:
        for out in outs:
            out[...] = _scale(out, postscale)


def _output_arrays(buffers: OperationBuffers) -> list[Array]:
    """Return the arrays for the result."""
    return list(buffers.outs) if buffers.outs is not None else [np.empty(a.shape, a.dtype) for a in buffers.arrays]


def _identity_array(op: HorovodOp, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Return the array of a rank that has joined: zeros for sums and averages, else values that change nothing."""
    value: Any = 0
    if op is HorovodOp.PRODUCT:
        value = 1
    elif op in (HorovodOp.MIN, HorovodOp.MAX):
        if is_float(dtype):
            value = np.inf if op is HorovodOp.MIN else -np.inf
        elif dtype == np.bool_:
            value = op is HorovodOp.MIN
        else:
            limits = np.iinfo(dtype)
            value = limits.max if op is HorovodOp.MIN else limits.min
    return np.full(shape, value, dtype)


def _widen(array: Array) -> Array:
    """Return integers in a dtype that holds their sum; floats stay unchanged."""
    if is_float(array.dtype):
        return array
    return array.astype(np.uint64 if array.dtype.kind == "u" else np.int64, copy=False)


def _divide(array: Array, count: int, factor: float) -> Array:
    """Divide an array by a number of ranks and multiply it by a factor; truncate integers once, as in Horovod."""
    if is_float(array.dtype):
        return _scale(array, factor / count)
    if factor != 1.0:
        scaled: Array = (array * np.float64(factor) / count).astype(array.dtype)
        return scaled
    if count == 1:
        return array
    quotients: Array = np.sign(array) * (np.abs(array) // np.asarray(count, array.dtype))
    return quotients


def _reducescatter(communicator: Communicator, array: Array, request: Request) -> Array:
    """Receive this rank's rows from all others and reduce them.

    `Communicator.reduce_scatter` does the same, but requires equal shares.
    """
    given, array = array.dtype, _scale(array, request.prescale)
    if request.op == HorovodOp.AVERAGE:
        array = _widen(array)
    array = np.ascontiguousarray(array)
    # Equal shares, and one remaining row for each of the first ranks, as in Horovod and in `array_split`.
    rows = communicator.all_to_all(np.array_split(array, communicator.world_size))
    out = np.empty(rows[0].shape, array.dtype)
    divisor = communicator.world_size if request.op == HorovodOp.AVERAGE else 1
    # Divide a mean of floats before rounding to their dtype, in which the sum may overflow.
    before, after = (divisor, 1) if is_float(array.dtype) else (1, divisor)
    if out.size:
        wire = wire_dtype(array.dtype)
        flat = [row.reshape(-1).astype(wire, copy=False) for row in rows]
        merge_rows(flat, out.reshape(-1), _REDUCE_OPS[HorovodOp(request.op)], before)
    return _divide(out, after, request.postscale).astype(given, copy=False)


def _scale(array: Array, factor: float) -> Array:
    """Multiply an array by a factor, in its dtype.

    As in Horovod, 16-bit floats are multiplied in float32; integers are multiplied in float64 and then truncated.
    """
    if factor == 1.0:
        return array
    if is_float(array.dtype):
        wire = wire_dtype(array.dtype)
        floats: Array = (array.astype(wire, copy=False) * wire.type(factor)).astype(array.dtype, copy=False)
        return floats
    integers: Array = (array * np.float64(factor)).astype(array.dtype)
    return integers


# --------------------------------------------------------------------------------------------------------- exchanges


def _broadcast(
    communicator: Communicator, requests: Sequence[Request], all_buffers: Sequence[OperationBuffers | None]
) -> None:
    arrays: list[Array] = []
    outs: list[Array] = []
    for buffers in all_buffers:
        # See `negotiation.refusal_reason`.
        assert buffers is not None, "broadcasts are refused once a rank has joined"
        buffers.result = _output_arrays(buffers)
        arrays += buffers.arrays
        outs += buffers.result
    communicator.broadcast(arrays, requests[0].root, out=outs)


def _alltoall(communicator: Communicator, buffers: OperationBuffers) -> list[Array]:
    (array,) = buffers.arrays
    received = communicator.all_to_all(np.split(array, np.cumsum(buffers.splits)[:-1]))
    return [np.concatenate(received), np.array([len(rows) for rows in received], np.int32)]
