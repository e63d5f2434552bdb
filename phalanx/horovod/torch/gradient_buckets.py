"""Gradients in buckets. A bucket is reduced as a whole when all its gradients are computed.

The parameters are divided into buckets once, equally on all ranks. The last parameters come first, as in a backward
pass. A complete bucket is sent while the backward pass continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.errors import ConfigurationError
from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.instance_numbers import InstanceNumber
from phalanx.horovod.operation_request import OperationKind
from phalanx.horovod.operations import PendingResult
from phalanx.horovod.torch.mpi_ops import sparse_allreduce_async
from phalanx.horovod.torch.torch_framework import start_collective

BUCKET_BYTES = 8 * 2**20
"""Bucket size: large enough to make the start of a collective negligible, small enough that most of a model's gradients
are reduced while others are computed."""


@dataclass(eq=False)
class BucketSlot:
    """One parameter's gradient.

    Attributes:
        parameter: The parameter.
        name: Name of the parameter.
        passes_left: Number of backward passes until the gradient is complete.
        is_sparse: Whether the gradient has been sparse before.
        is_placeholder: Whether the parameter is frozen and had no gradient: its zeros are only for the reduction.
        pending: The reduction of a sparse gradient.
    """

    parameter: torch.nn.Parameter
    name: str
    passes_left: int = 1
    is_sparse: bool = False
    is_placeholder: bool = False
    pending: PendingResult | None = None


@dataclass(eq=False)
class GradientBucket:
    """Gradients that travel together.

    Attributes:
        number: Number of the optimizer.
        index: Index of this bucket among the optimizer's buckets.
        slots: The gradients.
        reduction: The reduction of the gradients.
        missing: Number of incomplete gradients.
        is_started: Whether the reduction has been started.
    """

    number: InstanceNumber
    index: int
    slots: list[BucketSlot]
    reduction: GradientReduction
    missing: int = 0
    is_started: bool = False
    _pending: PendingResult | None = None  # of the dense gradients; each sparse one has its own, in its slot
    _packed: list[tuple[BucketSlot, torch.Tensor, Any]] = field(default_factory=list)  # what is sent, with contexts

    @property
    def is_touched(self) -> bool:
        """Whether a backward pass has completed any gradient, or the gradients are being reduced."""
        return self.is_started or self.missing < len(self.slots)

    def start(self, *, wake: bool) -> None:
        """Send the gradients; gradients that this rank has not computed count as zeros."""
        self.is_started = True
        self._packed = []
        reduction = self.reduction
        for slot in self.slots:
            slot.is_placeholder = slot.parameter.grad is None and not slot.parameter.requires_grad
            gradient = _gradient(slot)
            # Remembered: a rank whose batch does not reach the parameter must contribute an empty sparse gradient, not
            # zeros, to the operations that the others start.
            slot.is_sparse = slot.is_sparse or gradient.is_sparse
            if gradient.is_sparse and reduction.sparse_as_dense:
                gradient = gradient.to_dense()
            if gradient.is_sparse:
                slot.pending = sparse_allreduce_async(gradient, slot.name, reduction.op, reduction.process_set)
            else:
                self._packed.append((slot, *reduction.compression.compress(gradient)))
        if self._packed:
            arguments = reduction.to_arguments(f"{self.number.name}.gradients.{self.index}")
            tensors = [tensor for _, tensor, _ in self._packed]
            self._pending = start_collective(OperationKind.ALLREDUCE, tensors, arguments, in_place=True, wake=wake)

    def finish(self, passes: int) -> None:
        """Wait for the reduced gradients, store them in the parameters, and reset the bucket.

        Args:
            passes: Number of backward passes that complete the next gradients.
        """
        try:
            if self._pending is not None:
                self._pending.wait()
                for slot, tensor, ctx in self._packed:
                    merged = self.reduction.compression.decompress(tensor, ctx)
                    if slot.is_sparse:  # reduced as a dense gradient, but the optimizer expects a sparse one
                        merged = merged.to_sparse(1)
                    if merged is not slot.parameter.grad:  # compressed or sparse; otherwise reduced in place
                        slot.parameter.grad = merged.to(slot.parameter.dtype)
            for slot in self.slots:
                if slot.pending is not None:
                    slot.parameter.grad = slot.pending.wait()
                if slot.is_placeholder:  # otherwise weight decay and momentum would change the parameter
                    slot.parameter.grad = None
        finally:
            self.reset(passes)

    def reset(self, passes: int) -> None:
        """Expect the gradients of `passes` backward passes, and drop reductions in progress."""
        self.is_started, self.missing = False, len(self.slots)
        self._pending, self._packed = None, []
        for slot in self.slots:
            slot.passes_left, slot.pending = passes, None


def _gradient(slot: BucketSlot) -> torch.Tensor:
    """Return the parameter's gradient; zeros if it has none."""
    parameter = slot.parameter
    if parameter.grad is None:
        if slot.is_sparse:
            values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
            indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            parameter.grad = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
        else:
            parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def divide_by_size(parameters: Sequence[torch.nn.Parameter], limit: int) -> list[list[torch.nn.Parameter]]:
    """Divide the parameters, last ones first, into lists of up to `limit` bytes; a larger one is alone in its list."""
    lists: list[list[torch.nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if not lists or size > room:
            lists.append([])
            room = limit
        lists[-1].append(parameter)
        room -= size
    return lists


def divide_into_groups(
    parameters: Sequence[torch.nn.Parameter], groups: int | Sequence[Sequence[torch.nn.Parameter]] | None
) -> list[list[torch.nn.Parameter]]:
    """Divide the parameters into lists that travel together, in the order in which a backward pass finishes them.

    Args:
        parameters: Parameters in the order of the optimizer.
        groups: The number of lists, or the lists themselves (parameters in none of them are divided by size); None to
            divide all by size.

    Raises: ConfigurationError for parameters that are not the optimizer's, or are listed twice.
    """
    if groups is None:
        return divide_by_size(parameters, BUCKET_BYTES)
    if isinstance(groups, int):
        if groups < 0:
            raise ConfigurationError(f"groups is {groups}; it must be at least 0, or lists of parameters.")
        backwards, each = list(reversed(parameters)), -(-len(parameters) // max(1, groups))
        return [backwards[start : start + each] for start in range(0, len(backwards), each)]
    chosen = [[parameter for parameter in group if parameter.requires_grad] for group in groups]
    known = {id(parameter) for parameter in parameters}
    named = [id(parameter) for group in chosen for parameter in group]
    if len(set(named)) != len(named) or not set(named) <= known:
        raise ConfigurationError("groups must hold parameters of this optimizer, each of them once.")
    rest = [parameter for parameter in parameters if id(parameter) not in set(named)]
    return [group for group in chosen if group] + divide_by_size(rest, BUCKET_BYTES)
