"""The collectives that PyTorch can differentiate; `phalanx.horovod.gradients` says what their gradients are.

An allreduce can be differentiated as often as is wanted, as its gradient is one, too. Of the others a gradient of the
gradient is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from phalanx.horovod import gradients, operations
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.process_sets import ProcessSet
from phalanx.horovod.torch.host_tensors import from_host, tensors_of, to_host

Tensor: TypeAlias = torch.Tensor


def _reduced(reduce: Callable[..., Any], ctx: Any, name: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    op, prescale, postscale, group = ctx.arguments
    pending = reduce(
        [to_host(tensor) for tensor in tensors],
        name=name,
        op=op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        process_set=group,
        wake=False,
    )
    return tuple(tensors_of(pending.wait(), tensors))


def _gradients(of: Callable[..., Any], ctx: Any, grads: Sequence[Tensor]) -> Any:
    return once(lambda *own: tensors_of(of([to_host(grad) for grad in own], *ctx.arguments), own), *grads)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Sequence[Tensor]], *upstream: Tensor) -> Any:
        return tuple(function(*upstream))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients.refuse_again()


def once(function: Callable[..., Sequence[Tensor]], *upstream: Tensor) -> Any:
    """What a function makes of what flows back, where a gradient of that must not be taken for nothing.

    PyTorch's own `once_differentiable` raises in `backward` only: `torch.autograd.grad` passes it by.

    Raises: UnsupportedError where that is asked for.
    """
    return _Once.apply(function, *upstream)  # type: ignore[no-untyped-call]


class Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: Any, op: HorovodOp, prescale: float, postscale: float, group: ProcessSet, *tensors: Tensor
    ) -> Any:
        ctx.arguments = op, prescale, postscale, group
        return _reduced(operations.allreduce, ctx, name, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients.check_differentiable(ctx.arguments[0])
        return None, None, None, None, None, *Allreduce.apply(None, *ctx.arguments, *grads)  # type: ignore[no-untyped-call]


class Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, group: ProcessSet, *tensors: Tensor) -> Any:
        pending = operations.allgather(
            [to_host(tensor) for tensor in tensors], name=name, process_set=group, wake=False
        )
        ctx.arguments = [tensor.shape[0] for tensor in tensors], group
        return tuple(tensors_of(pending.wait(), tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_gradients(gradients.of_allgather, ctx, grads)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, root_rank: int, group: ProcessSet, tensor: Tensor) -> Any:
        ctx.arguments = root_rank, group
        pending = operations.broadcast([to_host(tensor)], root_rank, name=name, process_set=group, wake=False)
        return from_host(pending.wait()[0], tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, *_gradients(gradients.of_broadcast, ctx, [grad])


class Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, splits: Any, group: ProcessSet, tensor: Tensor) -> Any:
        pending = operations.alltoall(to_host(tensor), splits, name=name, process_set=group, wake=False)
        received, counts = pending.wait()
        ctx.arguments = counts, group
        return from_host(received, tensor), torch.tensor(counts, dtype=torch.int32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        return None, None, None, *_gradients(lambda own, *given: [gradients.of_alltoall(own[0], *given)], ctx, [grad])


class Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: Any, op: HorovodOp, prescale: float, postscale: float, group: ProcessSet, *tensors: Tensor
    ) -> Any:
        ctx.arguments = op, prescale, postscale, group
        return _reduced(operations.reducescatter, ctx, name, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, None, *_gradients(gradients.of_reducescatter, ctx, grads)
