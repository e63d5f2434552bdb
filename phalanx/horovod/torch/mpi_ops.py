"""Collectives of PyTorch's tensors. Names, arguments and meaning are Horovod's.

A handle is what a function with `_async` in its name returns; `synchronize` gives its result, `poll` says whether it is
there. Those with a trailing underscore put the result into the tensor that they got. Tensors on other devices than the
CPU pass through the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from phalanx.errors import ConfigurationError
from phalanx.horovod import operations
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Average, PendingResult, check_op
from phalanx.horovod.process_sets import ProcessSet, global_process_set
from phalanx.horovod.torch import autograd_functions
from phalanx.horovod.torch.compression import Compression
from phalanx.horovod.torch.host_tensors import all_to_host, from_host, over, shares_memory, tensors_of, to_host

Tensor: TypeAlias = torch.Tensor


def synchronize(handle: PendingResult) -> Any:
    """The result of an operation; waits until it is there. Raises HorovodInternalError if it failed."""
    if not isinstance(handle, PendingResult):
        raise ConfigurationError(f"synchronize got {handle!r}; pass what a function with _async in its name returned.")
    return handle.wait()


def poll(handle: PendingResult) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.done()


def join(device: int = -1) -> int:
    """See `operations.join`. `device` means nothing here."""
    return operations.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all members have called it."""
    operations.barrier(process_set)


# --------------------------------------------------------------------------------------------------------- allreduce


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    wake: bool = True,
) -> PendingResult:
    """Start to merge tensors in place, all at once. The handle's result is the tensors."""
    tensors = list(tensors)
    arrays = all_to_host(tensors)
    pending = operations.allreduce(
        arrays,
        name=name,
        op=check_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        outs=arrays,
        wake=wake,
    )
    pending.finish = lambda results: _put_back(tensors, results)
    return pending


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> PendingResult:
    """Start to merge tensors, all at once. The handle's result is a list of new tensors."""
    tensors = list(tensors)
    pending = operations.allreduce(
        all_to_host(tensors),
        name=name,
        op=check_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    pending.finish = lambda results: tensors_of(results, tensors)
    return pending


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Merge tensors in place, all at once."""
    merged: list[Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, wake=False
    ).wait()
    return merged


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Merge tensors, all at once, as new ones. It has a gradient."""
    packed = [compression.compress(tensor) for tensor in tensors]
    merged = _apply(
        autograd_functions.Allreduce,
        name,
        check_op(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
        *[tensor for tensor, _ in packed],
    )
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(merged, packed, strict=True)]


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> PendingResult:
    """Start to merge a tensor in place. The handle's result is the tensor."""
    return _one(grouped_allreduce_async_([tensor], average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> PendingResult:
    """Start to merge a tensor. The handle's result is a new one."""
    return _one(grouped_allreduce_async([tensor], average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Merge a tensor in place."""
    return grouped_allreduce_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)[0]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The tensor merged over the ranks (`operations.allreduce`), as a new one. It has a gradient."""
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: HorovodOp | None = None, process_set: ProcessSet = global_process_set
) -> PendingResult:
    """Start to merge a sparse tensor: all ranks' entries are gathered. The handle's result is a sparse tensor."""
    op = check_op(op)
    if op not in (operations.Average, operations.Sum):
        raise ConfigurationError(f"a sparse tensor can be merged by Average or Sum, not by {op.value}.")
    entries = tensor.coalesce()
    # As one group: entries and their places must not be parted.
    pending = operations.allgather(
        [to_host(entries.indices().t()), to_host(entries.values())], name=name, process_set=process_set
    )

    def finish(results: Sequence[Any]) -> Tensor:
        indices, values = tensors_of(results, [entries.values()] * 2)
        if op is Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, entries.shape).coalesce()

    pending.finish = finish
    return pending


# --------------------------------------------------------------------------------------------------------- allgather


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> PendingResult:
    """Start to join tensors over the ranks, all at once. The handle's result is a list of new tensors."""
    tensors = list(tensors)
    pending = operations.allgather(all_to_host(tensors), name=name, process_set=process_set)
    pending.finish = lambda results: tensors_of(results, tensors)
    return pending


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Tensors joined over the ranks, all at once. It has a gradient."""
    return list(_apply(autograd_functions.Allgather, name, process_set, *tensors))


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> PendingResult:
    """Start to join a tensor over the ranks. The handle's result is a new one."""
    return _one(grouped_allgather_async([tensor], name, process_set))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The ranks' tensors joined along the first dimension, which may differ. It has a gradient."""
    return grouped_allgather([tensor], name, process_set)[0]


# --------------------------------------------------------------------------------------------------------- broadcast


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> PendingResult:
    """Start to put rank `root_rank`'s tensor into everybody's. The handle's result is the tensor."""
    array = to_host(tensor)
    pending = operations.broadcast([array], root_rank, name=name, process_set=process_set, outs=[array])
    pending.finish = lambda results: _put_back([tensor], results)[0]
    return pending


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> PendingResult:
    """Start to send rank `root_rank`'s tensor to all. The handle's result is a new tensor."""
    pending = operations.broadcast([to_host(tensor)], root_rank, name=name, process_set=process_set)
    pending.finish = lambda results: from_host(results[0], tensor)
    return pending


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Put rank `root_rank`'s tensor into everybody's."""
    result: Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of rank `root_rank`, as a new one on every rank. It has a gradient."""
    result: Tensor = _apply(autograd_functions.Broadcast, name, root_rank, process_set, tensor)
    return result


# ---------------------------------------------------------------------------------------- alltoall and reducescatter


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> PendingResult:
    """Start to send parts of a tensor to all ranks. The handle's result is as that of `alltoall`."""
    pending = operations.alltoall(to_host(tensor), _splits(splits), name=name, process_set=process_set)

    def finish(result: tuple[Any, list[int]]) -> Tensor | tuple[Tensor, Tensor]:
        received = from_host(result[0], tensor)
        return received if splits is None else (received, torch.tensor(result[1], dtype=torch.int32))

    pending.finish = finish
    return pending


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """The rows that all ranks sent here, joined; with `splits`, also how many came from each. It has a gradient.

    Args:
        splits: how many rows go to each rank, zeros included; None: equal parts.
    """
    received, counts = _apply(autograd_functions.Alltoall, name, _splits(splits), process_set, tensor)
    return received if splits is None else (received, counts)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: HorovodOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> PendingResult:
    """Start to merge tensors and give each rank its rows. The handle's result is a list of new tensors."""
    tensors = list(tensors)
    pending = operations.reducescatter(
        all_to_host(tensors),
        name=name,
        op=check_op(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    pending.finish = lambda results: tensors_of(results, tensors)
    return pending


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: HorovodOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """This rank's rows of tensors merged over the ranks, all at once. It has a gradient."""
    packed = [compression.compress(tensor) for tensor in tensors]
    merged = _apply(
        autograd_functions.Reducescatter,
        name,
        check_op(op),
        prescale_factor,
        postscale_factor,
        process_set,
        *[tensor for tensor, _ in packed],
    )
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(merged, packed, strict=True)]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: HorovodOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> PendingResult:
    """Start to merge a tensor and give each rank its rows. The handle's result is a new tensor."""
    return _one(grouped_reducescatter_async([tensor], name, op, prescale_factor, postscale_factor, process_set))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: HorovodOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """This rank's rows of the tensor merged over the ranks. It has a gradient."""
    return grouped_reducescatter([tensor], name, compression, op, prescale_factor, postscale_factor, process_set)[0]


# ------------------------------------------------------------------------------------------------------------ helpers


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def _one(pending: PendingResult) -> PendingResult:
    """A group's operation of one tensor, whose result is that tensor."""
    finish = pending.finish
    assert finish is not None
    pending.finish = lambda results: finish(results)[0]
    return pending


def _put_back(tensors: Sequence[Tensor], results: Sequence[Any]) -> list[Tensor]:
    """Results that were written to arrays from `to_host`, in the tensors themselves."""
    for tensor, result in zip(tensors, results, strict=True):
        if not shares_memory(tensor):
            tensor.detach().copy_(over(result))
    return list(tensors)


def _splits(splits: Tensor | Sequence[int] | None) -> Any:
    if splits is None:
        return None
    values = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
    return np.asarray(values) if values else None
