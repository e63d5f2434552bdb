"""Collectives for PyTorch tensors, with Horovod's names and arguments; `framework_bindings` explains the forms.

Tensors on devices other than the CPU pass through host memory. Functions that return new tensors have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.errors import ConfigurationError
from phalanx.horovod import operations
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.framework_bindings import ARRAY_FUNCTIONS, make_collective_function, poll, synchronize
from phalanx.horovod.operation_request import HorovodOp, OperationKind
from phalanx.horovod.operations import Arguments, Average, PendingResult, Sum, barrier, check_op
from phalanx.horovod.torch.host_tensors import tensors_from_arrays, to_host
from phalanx.horovod.torch.torch_framework import run_collective, start_collective


def _function(name: str) -> Callable[..., Any]:
    return make_collective_function(__name__, name, run=run_collective, start=start_collective)


allreduce = _function("allreduce")
allreduce_ = _function("allreduce_")
allreduce_async = _function("allreduce_async")
allreduce_async_ = _function("allreduce_async_")
grouped_allreduce = _function("grouped_allreduce")
grouped_allreduce_ = _function("grouped_allreduce_")
grouped_allreduce_async = _function("grouped_allreduce_async")
grouped_allreduce_async_ = _function("grouped_allreduce_async_")
allgather = _function("allgather")
allgather_async = _function("allgather_async")
grouped_allgather = _function("grouped_allgather")
grouped_allgather_async = _function("grouped_allgather_async")
broadcast = _function("broadcast")
broadcast_ = _function("broadcast_")
broadcast_async = _function("broadcast_async")
broadcast_async_ = _function("broadcast_async_")
alltoall = _function("alltoall")
alltoall_async = _function("alltoall_async")
reducescatter = _function("reducescatter")
reducescatter_async = _function("reducescatter_async")
grouped_reducescatter = _function("grouped_reducescatter")
grouped_reducescatter_async = _function("grouped_reducescatter_async")


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: HorovodOp | None = None, process_set: ProcessSet = global_process_set
) -> PendingResult:
    """Start to reduce a sparse tensor by gathering the entries of all ranks.

    Args:
        tensor: A sparse COO tensor.
        name: Name of the operation; equal on all ranks.
        op: Average (default) or Sum.
        process_set: The ranks that take part.

    Returns: a handle; `synchronize(handle)`, or calling it, returns a sparse tensor.
    """
    op = check_op(op)
    if op not in (Average, Sum):
        raise ConfigurationError(f"a sparse tensor can be merged by Average or Sum, not by {op.value}.")
    entries = tensor.coalesce()
    # One group, so that indices and values stay together.
    arrays = [to_host(entries.indices().t()), to_host(entries.values())]
    pending = operations.start(OperationKind.ALLGATHER, arrays, Arguments(name, process_set))

    def finish(results: Sequence[Any]) -> torch.Tensor:
        indices, values = tensors_from_arrays(results, [entries.values()] * 2)
        if op is Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, entries.shape, check_invariants=False).coalesce()

    pending.finish = finish
    return pending


def join(device: int = -1) -> int:
    """See `operations.join`. `device` is ignored."""
    return operations.join()


__all__ = [
    *ARRAY_FUNCTIONS,
    "allreduce_",
    "allreduce_async_",
    "barrier",
    "broadcast_",
    "broadcast_async_",
    "grouped_allreduce_",
    "grouped_allreduce_async_",
    "join",
    "poll",
    "sparse_allreduce_async",
    "synchronize",
]
