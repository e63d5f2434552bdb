"""Reduces the gradients of a `DistributedOptimizer` while the backward pass computes them.

A hook on each parameter counts its gradient as complete; a bucket is started when all its gradients are complete. The
last bucket is left to `reduce`, which follows immediately and needs no other thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.horovod_job import current_job
from phalanx.horovod.instance_numbers import InstanceNumber
from phalanx.horovod.torch.gradient_buckets import BucketSlot, GradientBucket, divide_into_groups
from phalanx.monitoring import timeline

Parameter: TypeAlias = torch.nn.Parameter
Groups: TypeAlias = int | Sequence[Sequence[Parameter]] | None

_hooks: Any = WeakIdKeyDictionary()
"""The hook of each parameter. It belongs to the newest optimizer: an elastic job creates one in each call of its
function, and the former one may still be referenced. If that one is ever used again, it reduces in `step`."""


class GradientReducer:
    """The gradients of one optimizer.

    Args:
        optimizer: The optimizer that trains the parameters.
        names: Names of its parameters.
        reduction: The reduction of the gradients.
        passes: Number of backward passes whose gradients are summed before a step.
        groups: See `divide_into_groups`.

    Attributes:
        buckets: The gradients; empty if this rank trains alone.
        passes: Number of backward passes whose gradients are summed before a step.
        names: Names of the parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[Parameter, str],
        reduction: GradientReduction,
        passes: int,
        groups: Groups,
    ):
        self.buckets: list[GradientBucket] = []
        self.passes = passes
        self._optimizer = optimizer  # not its groups: `load_state_dict` replaces their list
        self.names = dict(names)
        self._reduction = reduction
        # Counted among optimizers with the same name of the first parameter: ranks may start to use optimizers in
        # different orders. (Not of all parameters: if these differ, ranks must meet in a collective to report it.)
        first = next((self.names[each] for group in optimizer.param_groups for each in group["params"]), "")
        self._number = InstanceNumber(f"torch.optimizer.{first}", reduction.process_set)
        self._unsent = 0  # number of buckets that are not yet complete in this step
        self._in_backward = False  # for the timeline: whether a gradient of this step has been computed
        # A process that is currently alone in an elastic job may have peers later.
        has_peers = reduction.process_set.size() > 1 or current_job().elastic is not None
        self._is_active = reduction.process_set.included() and has_peers
        self.watch_new_parameters(groups)

    @property
    def is_busy(self) -> bool:
        """Whether there are computed gradients that are not yet reduced."""
        return any(bucket.is_touched for bucket in self.buckets)

    def name_parameters(self, parameters: Iterable[Parameter]) -> None:
        """Give names to parameters that were added to the optimizer."""
        for parameter in parameters:
            self.names.setdefault(parameter, f"added.{len(self.names)}")

    def watch_new_parameters(self, groups: Groups = None) -> None:
        """Put parameters that require gradients and have no bucket into buckets: new ones and newly unfrozen ones."""
        if not self._is_active:
            return
        watched = {id(slot.parameter) for bucket in self.buckets for slot in bucket.slots}
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        new = [parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in watched]
        for members in divide_into_groups(new, groups) if new else []:
            slots = [BucketSlot(parameter, self.names[parameter]) for parameter in members]
            bucket = GradientBucket(self._number, len(self.buckets), slots, self._reduction)
            bucket.reset(self.passes)
            # After the others, whose indices, and thus the names of their collectives, must not change.
            self.buckets.append(bucket)
            self._unsent = len(self.buckets)
            for slot in slots:
                parameter: Any = slot.parameter
                former: RemovableHandle | None = _hooks.pop(parameter, None)
                if former is not None:
                    former.remove()
                _hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))

    def _hook(self, bucket: GradientBucket, slot: BucketSlot) -> Callable[[torch.Tensor], None]:
        def count_gradient(_: torch.Tensor) -> None:
            if slot.passes_left <= 0:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                    "backward_passes_per_step to accumulate gradients locally."
                )
            if not self._in_backward:
                self._in_backward = True
                timeline.current.enter("backward")
            slot.passes_left -= 1
            if slot.passes_left == 0:
                bucket.missing -= 1
                if not bucket.missing and not bucket.is_started:
                    self._unsent -= 1
                    # Ranks may complete buckets in different orders: each is named, and starts when complete on all.
                    if self._unsent:
                        bucket.start(wake=True)

        return count_gradient

    def reduce(self) -> None:
        """Wait until all gradients are reduced; gradients that were not computed count as zeros."""
        self.watch_new_parameters()
        # Request all before waiting for the first, so that they are fused.
        for bucket in self.buckets:
            if not bucket.is_started:
                bucket.start(wake=False)
        try:
            for bucket in self.buckets:
                bucket.finish(self.passes)
        finally:
            self.reset()

    def reset(self) -> None:
        """Expect the gradients of the next step."""
        for bucket in self.buckets:
            bucket.reset(self.passes)
        self._unsent = len(self.buckets)
        self._in_backward = False
