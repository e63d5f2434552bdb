"""The collectives that PyTorch can differentiate; `phalanx.horovod.gradients` says what their gradients are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from phalanx.horovod import gradients, operations
from phalanx.horovod.process_sets import ProcessSet
from phalanx.horovod.request import Op
from phalanx.horovod.torch.tensors import from_host, tensors_of, to_host

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


def _gradients(of: Callable[..., Any], ctx: Any, grads: Sequence[Tensor]) -> list[Tensor]:
    return tensors_of(of([to_host(grad) for grad in grads], *ctx.arguments), grads)


class Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: Any, op: Op, prescale: float, postscale: float, group: ProcessSet, *tensors: Tensor
    ) -> Any:
        ctx.arguments = op, prescale, postscale, group
        return _reduced(operations.allreduce, ctx, name, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, None, *_gradients(gradients.of_allreduce, ctx, grads)


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
        return None, None, None, from_host(gradients.of_alltoall(to_host(grad), *ctx.arguments), grad)


class Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: Any, op: Op, prescale: float, postscale: float, group: ProcessSet, *tensors: Tensor
    ) -> Any:
        ctx.arguments = op, prescale, postscale, group
        return _reduced(operations.reducescatter, ctx, name, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, None, *_gradients(gradients.of_reducescatter, ctx, grads)
