"""Gradients in buckets, each of which travels as one as soon as all its gradients are there.

The parameters are cut into buckets once, last ones first (the order in which a backward pass finishes them), alike on
all ranks. A bucket that is complete starts on its way while the backward pass goes on; the last one is left
to `wait`, which follows at once and does it without another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.horovod.instance_numbers import InstanceNumber
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Average, PendingResult
from phalanx.horovod.process_sets import ProcessSet
from phalanx.horovod.torch.mpi_ops import grouped_allreduce_async_, sparse_allreduce_async

BUCKET_BYTES = 8 * 2**20
"""Large enough that the start of a collective does not count, small enough that most of a model's gradients are merged
while others are computed."""


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are merged: the arguments of `DistributedOptimizer` of these names."""

    compression: Any
    op: HorovodOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def scales(self) -> tuple[float, float]:
        """The factors before and after the sum; an average divides by the number of ranks besides."""
        return (1.0 / self.predivide, self.predivide) if self.op is Average else (1.0, 1.0)


@dataclass(eq=False)
class BucketSlot:
    """One parameter's gradient.

    Attributes:
        left: backward passes until it is complete.
        is_sparse: whether it has been sparse so far.
        lent: whether its parameter is frozen and had no gradient: the zeros there now are for the way only.
    """

    parameter: torch.nn.Parameter
    name: str
    left: int = 1
    is_sparse: bool = False
    lent: bool = False
    pending: PendingResult | None = None  # a sparse gradient's


@dataclass(eq=False)
class GradientBucket:
    """Gradients that travel together.

    Attributes:
        number: of the optimizer.
        index: among the buckets of it.
        missing: how many are not complete.
    """

    number: InstanceNumber
    index: int
    slots: list[BucketSlot]
    way: ReductionOptions
    missing: int = 0
    started: bool = False
    _pending: PendingResult | None = None
    _packed: list[tuple[BucketSlot, torch.Tensor, Any]] = field(default_factory=list)

    def start(self, *, wake: bool) -> None:
        """Send the gradients; those that this rank has not computed count as zeros."""
        self.started = True
        self._packed = []
        for slot in self.slots:
            slot.lent = slot.parameter.grad is None and not slot.parameter.requires_grad
            gradient = _gradient(slot, self.way.sparse_as_dense)
            if gradient.is_sparse:
                slot.is_sparse = True
                slot.pending = sparse_allreduce_async(gradient, slot.name, self.way.op, self.way.process_set)
            else:
                self._packed.append((slot, *self.way.compression.compress(gradient)))
        if self._packed:
            prescale, postscale = self.way.scales
            self._pending = grouped_allreduce_async_(
                [tensor for _, tensor, _ in self._packed],
                name=f"optimizer.{int(self.number)}.gradients.{self.index}",
                op=self.way.op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=self.way.process_set,
                wake=wake,
            )

    def finish(self, passes: int) -> None:
        """Put the merged gradients in their places, and begin anew with so many backward passes to come."""
        try:
            if self._pending is not None:
                self._pending.wait()
                for slot, tensor, ctx in self._packed:
                    merged = self.way.compression.decompress(tensor, ctx)
                    if merged is not slot.parameter.grad:
                        slot.parameter.grad = merged.to(slot.parameter.dtype)
            for slot in self.slots:
                if slot.pending is not None:
                    slot.parameter.grad = slot.pending.wait()
                if slot.lent:  # else weight decay and momentum would change it
                    slot.parameter.grad = None
        finally:
            self.begin(passes)

    def begin(self, passes: int) -> None:
        """Wait for the gradients of so many backward passes; what was under way is forgotten."""
        self.started, self.missing = False, len(self.slots)
        self._pending, self._packed = None, []
        for slot in self.slots:
            slot.left, slot.pending = passes, None


def _gradient(slot: BucketSlot, dense: bool) -> torch.Tensor:
    """The parameter's gradient; zeros, if it has none."""
    parameter = slot.parameter
    if parameter.grad is None:
        if slot.is_sparse and not dense:
            nothing = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
            places = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            parameter.grad = torch.sparse_coo_tensor(places, nothing, parameter.shape)
        else:
            parameter.grad = torch.zeros_like(parameter)
    elif dense and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def cut(parameters: Sequence[torch.nn.Parameter], limit: int) -> list[list[torch.nn.Parameter]]:
    """The parameters, last ones first, in lists of up to `limit` bytes; a larger one alone."""
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
