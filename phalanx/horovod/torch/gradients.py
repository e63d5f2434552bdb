"""Gradients merged over the ranks at once, for optimizers that are not of `torch.optim`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.horovod import step_reports
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Average
from phalanx.horovod.process_sets import ProcessSet, global_process_set
from phalanx.horovod.torch.compression import Compression
from phalanx.horovod.torch.mpi_ops import grouped_allreduce_async_


def merge_gradients(
    gradients: Sequence[torch.Tensor | None],
    *,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: HorovodOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[torch.Tensor | None]:
    """Gradients merged over the ranks, all of them as one and in place; None stays None, sparse ones become dense."""
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients if gradient is not None]
    packed = [compression.compress(gradient.detach()) for gradient in dense]
    average = op is Average
    results = step_reports.merged(
        lambda: grouped_allreduce_async_(
            [tensor for tensor, _ in packed],
            name=name,
            op=op,
            prescale_factor=1.0 / gradient_predivide_factor if average else 1.0,
            postscale_factor=gradient_predivide_factor if average else 1.0,
            process_set=process_set,
            wake=False,
        ).wait()
    )
    merged = list(gradients)
    for index, result, (_, ctx) in zip(present, results, packed, strict=True):
        merged[index] = compression.decompress(result, ctx)
    return merged
