"""Batch normalization over the batches of all ranks. The name is Horovod's.

Forward, each rank sends count, mean and sum of squared deviations of its own batch, from which all compute those of the
whole batch (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1: no squares of
means are subtracted, so no digits are lost). Backward, two sums over the ranks are needed (Ioffe and Szegedy 2015,
section 3).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

from phalanx.errors import ConfigurationError
from phalanx.horovod.basics import size
from phalanx.horovod.instance_numbers import InstanceNumber
from phalanx.horovod.operations import Sum
from phalanx.horovod.process_sets import global_process_set
from phalanx.horovod.torch.mpi_ops import allgather, allreduce
from phalanx.horovod.torch.torch_framework import differentiable_once

Tensor: TypeAlias = torch.Tensor


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization whose statistics, during training, are those of all ranks' batches together.

    Outputs and input gradients are those of one process on the whole batch, even if the ranks' batches differ in size.
    Gradients of weight and bias are local, as for every parameter; `DistributedOptimizer` reduces them. All ranks must
    compute the layers in the same order. Works on any device (in Horovod, only on GPUs).

    Args: as for `torch.nn.BatchNorm2d`. Inputs have the shape (samples, features, ...).

    Raises: ConfigurationError for inputs of another shape, or if all ranks together have one value for each feature.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._hvd_number = InstanceNumber("torch.sync_batch_norm", global_process_set)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ConfigurationError(
                f"SyncBatchNorm of {self.num_features} features got an input of shape {tuple(input.shape)}; it takes "
                f"(samples, {self.num_features}, ...)."
            )

    def forward(self, input: Tensor) -> Tensor:
        """See `torch.nn.BatchNorm2d`."""
        if size() == 1 or not (self.training or self.running_mean is None):
            output: Tensor = super().forward(input)
            return output
        self._check_input_dim(input)
        normalize: Any = _Normalization.apply  # untyped in PyTorch
        result: Tensor
        name = f"sync_batch_norm.{int(self._hvd_number)}"
        result, mean, variance, count = normalize(input, self.weight, self.bias, self.eps, name)
        if self.training and self.running_mean is not None:
            self._update_running(mean, variance, float(count))
        return result

    def _update_running(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """As in PyTorch, the running variance is that of the population of which the batch is a sample."""
        tracked: Any = self.num_batches_tracked
        tracked += 1
        momentum = 1.0 / float(tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        with torch.no_grad():
            for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                if running is not None:
                    running.lerp_(new.to(running.dtype), momentum)


class _Normalization(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, name: str) -> Any:
        x = input.detach().to(_wide(input.dtype))
        mean, squares, count = _whole(x, name)
        if count < 2:
            raise ConfigurationError("SyncBatchNorm needs more than one value for each feature, of all ranks together.")
        variance = squares / count
        inverse = torch.rsqrt(variance + eps)
        shape = _beside(x)
        normal = (x - mean.view(shape)) * inverse.view(shape)
        result = normal if weight is None else normal * weight.view(shape)
        result = result if bias is None else result + bias.view(shape)
        ctx.save_for_backward(input, mean, inverse, weight)
        ctx.count, ctx.name, ctx.dtype = count, name, input.dtype
        ctx.mark_non_differentiable(mean, variance)
        return result.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> Any:
        input, mean, inverse, weight = ctx.saved_tensors
        axes, shape = _others(input), _beside(input)
        normal = (input.detach().to(inverse.dtype) - mean.view(shape)) * inverse.view(shape)

        def of_all(given: Tensor, _: Tensor) -> list[Tensor]:
            given = given.to(normal.dtype)
            own = [given.sum(axes), (given * normal).sum(axes)]
            if ctx.needs_input_grad[0]:
                sums = allreduce(torch.stack(own), op=Sum, name=f"{ctx.name}.backward") / ctx.count
                scale = inverse if weight is None else inverse * weight
                centred = given - sums[0].view(shape) - normal * sums[1].view(shape)
                own.append((centred * scale.view(shape)).to(ctx.dtype))
            return own

        of_bias, of_weight, *of_input = differentiable_once(of_all, upstream, input)
        found = of_input[0] if of_input else None
        if weight is None:
            return found, None, None, None, None
        return found, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


def _whole(x: Tensor, name: str) -> tuple[Tensor, Tensor, int]:
    """Mean and sum of squared deviations of each feature, and the number of its values, over all ranks."""
    axes, features = _others(x), x.shape[1]
    count = x.numel() // features if features else 0
    mean = x.mean(axes) if count else x.new_zeros(features)
    squares = (x - mean.view(_beside(x))).square().sum(axes) if count else x.new_zeros(features)
    # In float64, since a count must be exact; on the host, since that is where they are sent from.
    own = torch.cat([torch.tensor([count], dtype=torch.float64), mean.cpu().double(), squares.cpu().double()])
    rows = allgather(own[None], name=f"{name}.forward")
    counts, means, of_squares = rows[:, :1], rows[:, 1 : 1 + features], rows[:, 1 + features :]
    total = counts.sum()
    whole = (counts * means).sum(0) / total
    deviations = of_squares.sum(0) + (counts * (means - whole).square()).sum(0)
    return whole.to(x), deviations.to(x), int(total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _others(x: Tensor) -> list[int]:
    """All dimensions but the one of the features."""
    return [0, *range(2, x.dim())]


def _beside(x: Tensor) -> list[int]:
    """The shape in which one number for each feature broadcasts to the input."""
    return [1, -1, *[1] * (x.dim() - 2)]
