"""Reduces all gradients over the ranks in one call, for optimizers that are not from `torch.optim`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.arrays.tree import map_non_none
from phalanx.horovod import step_reports
from phalanx.horovod.compressors import run_compressed
from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.operation_request import OperationKind
from phalanx.horovod.torch.torch_framework import start_collective


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reduce_gradients(
    gradients: Sequence[torch.Tensor | None], reduction: GradientReduction, name: str | None = None
) -> list[torch.Tensor | None]:
    """Reduce gradients over the ranks, all of them together and in place; None stays None, sparse ones become dense.

    Args:
        gradients: Gradients of one step.
        reduction: The reduction of the gradients.
        name: Name of the collective.
    """
    arguments = reduction.to_arguments(name)

    def reduce(packed: list[torch.Tensor]) -> list[torch.Tensor]:
        pending = start_collective(OperationKind.ALLREDUCE, packed, arguments, in_place=True, wake=False)
        return step_reports.report_reduction(pending.wait)

    def reduce_dense(present: list[torch.Tensor]) -> list[torch.Tensor]:
        dense = [_writable((each.to_dense() if each.is_sparse else each).detach()) for each in present]
        return run_compressed(reduction.compression, dense, reduce)

    return map_non_none(reduce_dense, gradients)


def _writable(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient; a copy if some of its elements share memory, as in the gradient of a sum."""
    repeats = any(step == 0 and size > 1 for step, size in zip(gradient.stride(), gradient.shape, strict=True))
    return gradient.contiguous() if repeats else gradient
