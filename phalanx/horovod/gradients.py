"""The gradients of the collectives, on arrays, as Horovod 0.28 defines them for TensorFlow and PyTorch.

Of an allreduce and an alltoall they are the adjoint operations: right for a loss that is the sum of the ranks' losses.
Of an allgather, a broadcast and a reducescatter they are those divided by the number of ranks: right for the mean of
the ranks' losses. That is Horovod's convention since 0.21, and programs rely on it. All members must ask for the
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.errors import UnsupportedError
from phalanx.horovod import operations
from phalanx.horovod.operation_request import Array, HorovodOp
from phalanx.horovod.process_sets import ProcessSet


def check_differentiable(op: HorovodOp) -> None:
    """Raises UnsupportedError for an op of an allreduce that has no gradient."""
    if op not in (HorovodOp.AVERAGE, HorovodOp.SUM, HorovodOp.ADASUM):
        raise UnsupportedError(f"allreduce with op={op.value} has no gradient here; Average, Sum and Adasum have.")


def refuse_again(*_: object) -> None:
    """In the place of the gradient of one of these gradients but an allreduce's, which is an allreduce. Raises:
    UnsupportedError."""
    raise UnsupportedError(
        "A gradient of the gradient of an allgather, broadcast, alltoall, reducescatter or SyncBatchNorm is not "
        "supported; of an allreduce it is."
    )


def of_allreduce(
    gradients: Sequence[Array],
    op: HorovodOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None = None,
) -> list[Array]:
    """Raises: as `check_differentiable`."""
    check_differentiable(op)
    pending = operations.allreduce(
        gradients,
        name=name,
        op=op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        process_set=process_set,
        wake=False,
    )
    merged: list[Array] = pending.wait()
    return merged


def of_allgather(
    gradients: Sequence[Array], rows: Sequence[int], process_set: ProcessSet, name: str | None = None
) -> list[Array]:
    """Args: rows: how many this rank brought of each array."""
    merged = of_allreduce(gradients, HorovodOp.AVERAGE, 1.0, 1.0, process_set, name)
    sizes = operations.allgather(
        [np.array([rows], np.int64)], name=None if name is None else f"{name}.rows", process_set=process_set, wake=False
    ).wait()[0]
    starts = sizes[: process_set.rank()].sum(axis=0)
    return [each[start : start + count] for each, start, count in zip(merged, starts, rows, strict=True)]


def of_broadcast(
    gradients: Sequence[Array], root_rank: int, process_set: ProcessSet, name: str | None = None
) -> list[Array]:
    """Zeros on all ranks but the root."""
    merged = of_allreduce(gradients, HorovodOp.AVERAGE, 1.0, 1.0, process_set, name)
    is_root = process_set.rank() == process_set.position(root_rank, "root_rank")
    return merged if is_root else [np.zeros_like(each) for each in merged]


def of_alltoall(
    gradient: Array, received_splits: Sequence[int] | Array, process_set: ProcessSet, name: str | None = None
) -> Array:
    """Args: received_splits: what came from each rank."""
    pending = operations.alltoall(gradient, received_splits, name=name, process_set=process_set, wake=False)
    back: Array = pending.wait()[0]
    return back


def of_reducescatter(
    gradients: Sequence[Array],
    op: HorovodOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None = None,
) -> list[Array]:
    """Raises UnsupportedError for an op that has no gradient."""
    if op not in (HorovodOp.AVERAGE, HorovodOp.SUM):
        raise UnsupportedError(f"reducescatter with op={op.value} has no gradient here; Average and Sum have.")
    factor = prescale * postscale * (process_set.size() if op is HorovodOp.SUM else 1)
    scaled = [(each * factor).astype(each.dtype) if factor != 1.0 else each for each in gradients]
    pending = operations.allgather(scaled, name=name, process_set=process_set, wake=False)
    gathered: list[Array] = pending.wait()
    return gathered
