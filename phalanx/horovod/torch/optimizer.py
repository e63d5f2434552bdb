"""An optimizer of `torch.optim` that merges gradients over the ranks first. Names and meaning are Horovod's."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from phalanx.errors import ConfigurationError
from phalanx.horovod import step_reports
from phalanx.horovod.horovod_job import current
from phalanx.horovod.instance_numbers import InstanceNumber
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Adasum, Average, check_op
from phalanx.horovod.process_sets import ProcessSet, global_process_set
from phalanx.horovod.torch.buckets import BUCKET_BYTES, BucketSlot, GradientBucket, ReductionOptions, cut
from phalanx.horovod.torch.compression import Compression
from phalanx.horovod.torch.mpi_ops import grouped_allreduce_
from phalanx.monitoring import timeline

Parameter: TypeAlias = torch.nn.Parameter

_watching: Any = WeakIdKeyDictionary()
"""The hook of each parameter. It is the newest optimizer's: an elastic job makes one anew in each call of its function,
and whoever made the former may still hold it. That one merges in `step`, if it is ever called again."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: HorovodOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, of a subclass of its class, which merges the gradients over the ranks before each step.

    Gradients travel while the backward pass goes on; `step()` waits for them. Between `loss.backward()` and `step()`
    they are this rank's own, or being merged: to use merged ones (to clip them), call `synchronize()` first and then
    `step()` inside `with optimizer.skip_synchronize()`.

    Args:
        optimizer: gives its parameters, options and state to the new one, and must not be used any more.
        named_parameters: `model.named_parameters()`; names show in errors. All of the optimizer's, if given.
        compression: see `Compression`.
        backward_passes_per_step: backward passes before each step, whose gradients add up.
        op: Average, Sum, Min, Max, Product; with Adasum the optimizer's steps are merged instead of the gradients.
        gradient_predivide_factor: an average divides by this before the sum, and by the rest after it.
        num_groups: the older form of `groups`.
        groups: into how many groups the gradients are cut, or the groups themselves, lists of parameters; each travels
            as one. None: by size.
        sparse_as_dense: make sparse gradients dense, instead of gathering the ranks' entries.
        process_set: the ranks that train together.

    Raises:
        ConfigurationError: an argument is wrong.
        HorovodInternalError: from `step`, if a collective failed.
    """
    op = check_op(op)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ConfigurationError(f"gradient_predivide_factor is for op Average, not {op.value}.")
    if backward_passes_per_step < 1:
        raise ConfigurationError(f"backward_passes_per_step is {backward_passes_per_step}; it must be at least 1.")
    names = _names(optimizer, named_parameters)
    mixin = _StepMerging if op is Adasum else _GradientMerging
    kind = type(type(optimizer).__name__, (mixin, type(optimizer)), {})
    merging: Any = kind.__new__(kind)  # type: ignore[call-overload]
    # Parameter groups and state are shared. What stands in the place of a method, as a scheduler's `step`, is not.
    own = {name: value for name, value in vars(optimizer).items() if not callable(getattr(kind, name, None))}
    vars(merging).update(own)
    merging._hvd_original = optimizer
    if op is Adasum:
        merging._hvd_way = ReductionOptions(compression, op, 1.0, sparse_as_dense, process_set)
        return merging
    if num_groups and groups is None:
        groups = num_groups
    way = ReductionOptions(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    merging._hvd_begin(names, way, backward_passes_per_step, groups)
    return merging


class _GradientMerging:
    """Before a torch.optim class: `step` merges the gradients first."""

    param_groups: list[dict[str, Any]]
    _hvd_original: Any

    def _hvd_begin(
        self,
        names: dict[Parameter, str],
        way: ReductionOptions,
        passes: int,
        groups: int | Sequence[Sequence[Parameter]] | None,
    ) -> None:
        self.backward_passes_per_step = passes
        self._hvd_number = InstanceNumber("torch.optimizer", way.process_set)
        self._hvd_names = names
        self._hvd_way = way
        self._hvd_buckets: list[GradientBucket] = []
        self._hvd_unsent = 0
        self._hvd_in_backward = False
        self._hvd_synchronized = False
        self._hvd_should_synchronize = True
        # A process of an elastic job that is alone now may have company later.
        others = way.process_set.size() > 1 or current().elastic is not None
        self._hvd_is_merging = way.process_set.included() and others
        if self._hvd_is_merging:
            self._hvd_watch(self._hvd_unwatched(), groups)

    def _hvd_unwatched(self) -> list[Parameter]:
        """What requires gradients and is in no bucket: parameters that are new here, or have been unfrozen."""
        watched = {id(slot.parameter) for bucket in self._hvd_buckets for slot in bucket.slots}
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return [parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in watched]

    def _hvd_watch(
        self, parameters: Sequence[Parameter], groups: int | Sequence[Sequence[Parameter]] | None = None
    ) -> None:
        for members in _grouped(parameters, groups):
            slots = [BucketSlot(parameter, self._hvd_names[parameter]) for parameter in members]
            bucket = GradientBucket(self._hvd_number, len(self._hvd_buckets), slots, self._hvd_way)
            bucket.begin(self.backward_passes_per_step)
            self._hvd_buckets.append(bucket)
            for slot in slots:
                parameter: Any = slot.parameter
                former: RemovableHandle | None = _watching.pop(parameter, None)
                if former is not None:
                    former.remove()
                _watching[parameter] = parameter.register_post_accumulate_grad_hook(self._hvd_hook(bucket, slot))
        self._hvd_unsent = len(self._hvd_buckets)

    def _hvd_hook(self, bucket: GradientBucket, slot: BucketSlot) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            if slot.left <= 0:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                    "backward_passes_per_step to accumulate gradients locally."
                )
            if not self._hvd_in_backward:
                self._hvd_in_backward = True
                timeline.current.enter("backward")
            slot.left -= 1
            if slot.left == 0:
                bucket.missing -= 1
                if not bucket.missing and not bucket.started:
                    self._hvd_unsent -= 1
                    if self._hvd_unsent:
                        bucket.start(wake=True)

        return arrived

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`; all ranks must call."""
        super().add_param_group(param_group)  # type: ignore[misc]
        added = list(self.param_groups[-1]["params"])
        for parameter in added:
            self._hvd_names.setdefault(parameter, f"added.{len(self._hvd_names)}")
        if self._hvd_is_merging:
            self._hvd_watch(self._hvd_unwatched())

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes come before a step, from now on."""
        self.backward_passes_per_step = passes
        self._hvd_reset()

    def synchronize(self) -> None:
        """Wait until all gradients are merged; `.grad` of the parameters is everybody's then."""
        step_reports.merged(self._hvd_merge, applied=True)
        self._hvd_synchronized = True

    def _hvd_merge(self) -> None:
        if self._hvd_is_merging and (unfrozen := self._hvd_unwatched()):
            self._hvd_watch(unfrozen)
        for bucket in self._hvd_buckets:
            if not bucket.started:
                bucket.start(wake=False)
        try:
            for bucket in self._hvd_buckets:
                bucket.finish(self.backward_passes_per_step)
        finally:
            self._hvd_reset()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step()` takes the gradients as they are, since `synchronize()` has been called."""
        self._hvd_should_synchronize = False
        try:
            yield
        finally:
            self._hvd_should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `torch.optim.Optimizer.step`. What a closure computes is merged each time that it is called."""
        if closure is not None and self._hvd_should_synchronize:
            times = itertools.count()
            return self._hvd_step(lambda: self._hvd_evaluate(closure, is_first=next(times) == 0))
        if self._hvd_should_synchronize:
            if self._hvd_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are merged twice.",
                    stacklevel=2,
                )
            self.synchronize()
        return self._hvd_step(closure)

    def _hvd_step(self, closure: Callable[[], Any] | None) -> Any:
        self._hvd_original._opt_called = True  # a scheduler that was made before asks it
        try:
            return super().step(closure)  # type: ignore[misc]
        finally:
            self._hvd_synchronized = False
            timeline.current.leave()

    def _hvd_evaluate(self, closure: Callable[[], Any], *, is_first: bool) -> Any:
        """What the closure computes, merged; where it computes nothing, what was there before is merged once."""
        loss = closure()
        if is_first or any(bucket.started or bucket.missing < len(bucket.slots) for bucket in self._hvd_buckets):
            self.synchronize()
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """See `torch.optim.Optimizer.zero_grad`. Raises AssertionError while gradients are being merged."""
        if any(bucket.started or bucket.missing < len(bucket.slots) for bucket in self._hvd_buckets):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """See `torch.optim.Optimizer.load_state_dict`."""
        self._hvd_reset()
        self._hvd_synchronized = False
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _hvd_reset(self) -> None:
        for bucket in self._hvd_buckets:
            bucket.begin(self.backward_passes_per_step)
        self._hvd_unsent = len(self._hvd_buckets)
        self._hvd_in_backward = False


class _StepMerging:
    """Before a torch.optim class: what a step changes is merged by Adasum.

    Source: Maleki et al. 2021, section 4: the optimizer runs on each rank's own gradients first.
    """

    param_groups: list[dict[str, Any]]
    _hvd_way: ReductionOptions
    _hvd_original: Any

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients of any number of backward passes add up before a step, without being told."""

    def synchronize(self) -> None:
        """Nothing is merged before the step."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: a step cannot do without."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `torch.optim.Optimizer.step`. A rank outside of the process set trains by itself."""
        way = self._hvd_way
        self._hvd_original._opt_called = True
        if not way.process_set.included():
            return super().step(closure)  # type: ignore[misc]
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        timeline.current.enter("apply")
        result = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            packed = [way.compression.compress(p - start) for p, start in zip(parameters, before, strict=True)]
            merged = step_reports.merged(
                lambda: grouped_allreduce_(
                    [tensor for tensor, _ in packed], name="steps", op=Adasum, process_set=way.process_set
                ),
                applied=True,
            )
            for parameter, start, tensor, (_, ctx) in zip(parameters, before, merged, packed, strict=True):
                parameter.copy_(start + way.compression.decompress(tensor, ctx))
        timeline.current.leave()
        return result


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Parameter]] | None) -> dict[Parameter, str]:
    """The optimizer's parameters with their names."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named is None:
        return {parameter: f"noname.{index}" for index, parameter in enumerate(own)}
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ConfigurationError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ConfigurationError(f"Parameter names in named_parameters must be unique; twice: {', '.join(twice)}.")
    names = {parameter: name for name, parameter in pairs}
    unnamed = [tuple(parameter.shape) for parameter in own if parameter not in names]
    if unnamed:
        raise ConfigurationError(
            f"named_parameters was specified, but one or more model parameters were not named: those of the shapes "
            f"{', '.join(map(str, unnamed[:5]))}."
        )
    return names


def _grouped(
    parameters: Sequence[Parameter], groups: int | Sequence[Sequence[Parameter]] | None
) -> list[list[Parameter]]:
    """The parameters in lists that travel as one, those first that the backward pass finishes first."""
    if groups is None:
        return cut(parameters, BUCKET_BYTES)
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
    return [group for group in chosen if group] + cut(rest, BUCKET_BYTES)
