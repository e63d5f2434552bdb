"""Differentiable collectives for PyTorch tensors.

An allreduce can be differentiated any number of times, since its gradient is an allreduce. For other collectives, the
gradient of the gradient is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from phalanx.horovod import operations
from phalanx.horovod.compressors import run_compressed
from phalanx.horovod.operation_request import OperationKind
from phalanx.horovod.operations import Arguments, PendingResult
from phalanx.horovod.torch.host_tensors import all_to_host, tensors_from_arrays, to_host, write_back

Tensor: TypeAlias = torch.Tensor


class _FirstOrderFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Sequence[Tensor]], *upstream: Tensor) -> Any:
        return tuple(function(*upstream))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        operations.raise_on_second_gradient()


def first_order_only(function: Callable[..., Sequence[Tensor]], *upstream: Tensor) -> Any:
    """Call a function of gradients, with an error for a second differentiation.

    PyTorch's `once_differentiable` raises only in `backward`: `torch.autograd.grad` bypasses it.

    Args:
        function: Function that computes gradients of the inputs.
        upstream: Gradients of the results.

    Raises: UnsupportedError when the result is differentiated.
    """
    return _FirstOrderFunction.apply(function, *upstream)  # type: ignore[no-untyped-call]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: OperationKind, arguments: Arguments, *tensors: Tensor) -> Any:
        results = operations.start(kind, all_to_host(tensors), arguments, wake=False).wait()
        ctx.kind, ctx.arguments, ctx.inputs = kind, arguments, len(tensors)
        if kind is OperationKind.ALLTOALL:
            ctx.rows = results[1]
        elif kind is OperationKind.ALLGATHER:
            ctx.rows = [len(each) for each in tensors]
        return tuple(tensors_from_arrays(results, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kind, arguments, rows = ctx.kind, ctx.arguments.for_gradient(), getattr(ctx, "rows", ())
        if kind is OperationKind.ALLREDUCE:
            operations.check_differentiable(arguments)
            return None, None, *_Collective.apply(kind, arguments, *grads)  # type: ignore[no-untyped-call]

        # An alltoall has one more result than inputs, the counts, through which no gradient flows.
        def back(*own: Tensor) -> list[Tensor]:
            return tensors_from_arrays(operations.gradient(kind, [to_host(grad) for grad in own], arguments, rows), own)

        return None, None, *first_order_only(back, *grads[: ctx.inputs])


def run_collective(
    kind: OperationKind, tensors: Sequence[Tensor], arguments: Arguments, compression: Any
) -> list[Tensor]:
    """See `framework_bindings.Run`."""

    def reduce(packed: Sequence[Tensor]) -> list[Tensor]:
        return list(_Collective.apply(kind, arguments, *packed))  # type: ignore[no-untyped-call]

    return reduce(tensors) if kind is OperationKind.ALLTOALL else run_compressed(compression, tensors, reduce)


def start_collective(
    kind: OperationKind,
    tensors: Sequence[Tensor],
    arguments: Arguments,
    *,
    in_place: bool = False,
    wake: bool = True,
) -> PendingResult:
    """See `framework_bindings.Start`."""
    arrays = all_to_host(tensors)
    pending = operations.start(kind, arrays, arguments, outs=arrays if in_place else None, wake=wake)
    convert = write_back if in_place else tensors_from_arrays
    pending.finish = lambda results: convert(results, tensors)
    return pending
