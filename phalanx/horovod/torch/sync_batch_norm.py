"""Batch normalization over the batches of all ranks. The name is Horovod's.

Mean and variance are computed from two sequential sums over the ranks, to avoid a loss of precision; gradients flow
back through these sums (Ioffe and Szegedy 2015, section 3).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from phalanx.errors import ConfigurationError
from phalanx.horovod.basics import size
from phalanx.horovod.common.process_sets import global_process_set
from phalanx.horovod.instance_numbers import InstanceNumber
from phalanx.horovod.operations import Sum
from phalanx.horovod.torch.mpi_ops import allreduce

Tensor: TypeAlias = torch.Tensor


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization that, during training, uses the statistics of all ranks' batches combined.

    Outputs and input gradients equal those of one process on the whole batch, even if the ranks' batches differ in
    size. Gradients of weight and bias are local, as for every parameter; `DistributedOptimizer` reduces them. All ranks
    must compute the layers in the same order. Works on any device (in Horovod, only on GPUs).

    Args: as for `torch.nn.BatchNorm2d`. Inputs have the shape (samples, features, ...).

    Raises: ConfigurationError for inputs of another shape, or if there is only one value per feature on all ranks.
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
        x = input.to(torch.float32) if input.dtype in (torch.float16, torch.bfloat16) else input
        others, beside = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        name = f"sync_batch_norm.{int(self._hvd_number)}"
        # In float64, since the count must be exact.
        own = torch.tensor([x.numel() // self.num_features], dtype=torch.float64, device=x.device)
        sums = allreduce(torch.cat([own, x.sum(others, dtype=torch.float64)]), op=Sum, name=f"{name}.sums")
        count = float(sums[0].detach())
        if count < 2:
            raise ConfigurationError("SyncBatchNorm needs more than one value for each feature, of all ranks together.")
        # Both sums are differentiable, so the input's gradient has the terms of mean and variance over all ranks.
        mean = (sums[1:] / count).to(x.dtype)
        deviations = x - mean.view(beside)
        squares = allreduce(deviations.square().sum(others), op=Sum, name=f"{name}.squares")
        variance = squares / count
        result: Tensor = deviations * torch.rsqrt(variance + self.eps).view(beside)
        if self.affine:
            result = result * self.weight.view(beside) + self.bias.view(beside)
        if self.training and self.running_mean is not None:
            self._update_running(mean.detach(), variance.detach(), count)
        return result.to(input.dtype)

    def _update_running(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Update the running statistics. As in PyTorch, the running variance is the unbiased estimate."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        with torch.no_grad():
            for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                if running is not None:
                    running.lerp_(new.to(running.dtype), momentum)
