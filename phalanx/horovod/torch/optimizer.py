"""A `torch.optim` optimizer that first reduces the gradients over the ranks. Names and semantics are Horovod's."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.errors import ConfigurationError
from phalanx.horovod import step_reports
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.compressors import run_compressed
from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Adasum, Average
from phalanx.horovod.torch.compression import Compression
from phalanx.horovod.torch.gradient_reducer import GradientReducer, Parameter
from phalanx.horovod.torch.mpi_ops import grouped_allreduce_
from phalanx.monitoring import timeline


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
    """Return the optimizer as an instance of a subclass that reduces the gradients over the ranks before each step.

    Gradients travel while the backward pass continues; `step()` waits for them. Between `loss.backward()` and `step()`,
    they are local to this rank or being reduced. To use the reduced gradients, for example to clip them, call
    `synchronize()` first and then `step()` inside `with optimizer.skip_synchronize()`.

    Args:
        optimizer: The original, whose parameters, options and state the new one takes over. Do not use it afterwards.
        named_parameters: `model.named_parameters()`, with all of the optimizer's parameters; errors show the names.
        compression: A compressor, see `Compression`.
        backward_passes_per_step: Number of backward passes whose gradients are summed before each step.
        op: Average, Sum, Min, Max or Product; with Adasum, the optimizer's steps are combined instead of the gradients.
        gradient_predivide_factor: See `GradientReduction`.
        num_groups: The older form of `groups`.
        groups: The number of groups of gradients that travel together, or the groups themselves, as lists of
            parameters. None to group by size.
        sparse_as_dense: Whether sparse gradients travel as dense ones, instead of gathering the entries of all ranks.
        process_set: The ranks that train together.

    Raises:
        ConfigurationError: an argument is invalid.
        HorovodInternalError: from `step`, if a collective failed.
    """
    reduction = GradientReduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    if backward_passes_per_step < 1:
        raise ConfigurationError(f"backward_passes_per_step is {backward_passes_per_step}; it must be at least 1.")
    if isinstance(optimizer, _GradientReductionMixin | _AdasumStepMixin):
        raise ConfigurationError("this optimizer is a DistributedOptimizer already.")
    names = _resolve_parameter_names(optimizer, named_parameters)
    mixin = _AdasumStepMixin if op is Adasum else _GradientReductionMixin
    # A subclass of the optimizer's class: schedulers and `isinstance` see the optimizer that the program chose.
    kind = type(type(optimizer).__name__, (mixin, type(optimizer)), {})
    distributed: Any = kind.__new__(kind)  # type: ignore[call-overload]
    # Parameter groups and state are shared. Attributes that replace a method, such as a scheduler's `step`, are not.
    shared = {name: value for name, value in vars(optimizer).items() if not callable(getattr(kind, name, None))}
    vars(distributed).update(shared)
    distributed._hvd_original = optimizer
    if op is Adasum:
        distributed._hvd_reduction = reduction
        return distributed
    distributed._hvd_reducer = GradientReducer(
        distributed, names, reduction, backward_passes_per_step, num_groups or None if groups is None else groups
    )
    distributed._hvd_is_synchronized = False
    distributed._hvd_synchronizes = True
    return distributed


class _GradientReductionMixin:
    """Mixin before a torch.optim class among the bases: `step` first reduces the gradients."""

    param_groups: list[dict[str, Any]]
    _hvd_original: Any
    _hvd_reducer: GradientReducer
    _hvd_is_synchronized: bool  # since the last step
    _hvd_synchronizes: bool  # False inside `skip_synchronize`

    @property
    def _parameter_names(self) -> dict[Parameter, str]:
        """The parameters' names, for programs that read this attribute of Horovod's optimizer."""
        return self._hvd_reducer.names

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes before each step."""
        return self._hvd_reducer.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._hvd_reducer.passes = passes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`; all ranks must call this."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._hvd_reducer.name_parameters(self.param_groups[-1]["params"])
        self._hvd_reducer.watch_new_parameters()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes before each step, starting now."""
        self._hvd_reducer.passes = passes
        self._hvd_reducer.reset()

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; then `.grad` of the parameters is the same on all ranks."""
        step_reports.report_reduction(self._hvd_reducer.reduce, applies_next=True)
        self._hvd_is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within the context, `step()` uses the gradients as they are, because `synchronize()` has been called."""
        self._hvd_synchronizes = False
        try:
            yield
        finally:
            self._hvd_synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `torch.optim.Optimizer.step`. The gradients of a closure are reduced each time it is called."""
        if closure is not None and self._hvd_synchronizes:
            times = itertools.count()
            return self._hvd_step(lambda: self._hvd_evaluate(closure, is_first=next(times) == 0))
        if self._hvd_synchronizes:
            if self._hvd_is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are merged twice.",
                    stacklevel=2,
                )
            self.synchronize()
        return self._hvd_step(closure)

    def _hvd_step(self, closure: Callable[[], Any] | None) -> Any:
        self._hvd_original._opt_called = True  # read by a scheduler that was created before
        try:
            # The `step` of the original class, which calls the closure, perhaps several times (LBFGS).
            return super().step(closure)  # type: ignore[misc]
        finally:
            self._hvd_is_synchronized = False
            timeline.current.leave()

    def _hvd_evaluate(self, closure: Callable[[], Any], *, is_first: bool) -> Any:
        """Call the closure and reduce its gradients; if it computes none, reduce the existing ones once."""
        loss = closure()
        if is_first or self._hvd_reducer.is_busy:
            self.synchronize()
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """See `torch.optim.Optimizer.zero_grad`. Raises AssertionError while gradients are being reduced."""
        if self._hvd_reducer.is_busy:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """See `torch.optim.Optimizer.load_state_dict`."""
        self._hvd_reducer.reset()
        self._hvd_is_synchronized = False
        with _keep_param_groups(self):
            super().load_state_dict(*args, **kwargs)  # type: ignore[misc]


class _AdasumStepMixin:
    """Mixin before a torch.optim class among the bases: Adasum combines the changes made by a step.

    Source: Maleki et al. 2021, section 4: the optimizer first runs on each rank's local gradients.
    """

    param_groups: list[dict[str, Any]]
    _hvd_reduction: GradientReduction
    _hvd_original: Any

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: the gradients of any number of backward passes are summed before a step."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """See `torch.optim.Optimizer.load_state_dict`."""
        with _keep_param_groups(self):
            super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Do nothing: gradients are not reduced before the step."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError: every step is combined."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `torch.optim.Optimizer.step`. A rank outside of the process set trains alone."""
        reduction = self._hvd_reduction
        self._hvd_original._opt_called = True
        if not reduction.process_set.included():
            return super().step(closure)  # type: ignore[misc]
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        # Ranks that started equal have equal parameters here, and again after the combined change.
        before = [parameter.detach().clone() for parameter in parameters]
        timeline.current.enter("apply")
        result = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            changes = [parameter - start for parameter, start in zip(parameters, before, strict=True)]
            combined = run_compressed(reduction.compression, changes, self._hvd_combine)
            for parameter, start, change in zip(parameters, before, combined, strict=True):
                parameter.copy_(start + change)
        timeline.current.leave()
        return result

    def _hvd_combine(self, changes: list[torch.Tensor]) -> list[torch.Tensor]:
        return step_reports.report_reduction(
            lambda: grouped_allreduce_(changes, name="steps", op=Adasum, process_set=self._hvd_reduction.process_set),  # type: ignore[no-any-return]
            applies_next=True,
        )


@contextmanager
def _keep_param_groups(optimizer: Any) -> Iterator[None]:
    """Keep the parameter groups while a state is loaded, and copy its options into them: a scheduler created for the
    original optimizer sets the learning rate in these groups, which PyTorch would replace."""
    groups = optimizer.param_groups
    yield
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if loaded is not group:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = groups


def _resolve_parameter_names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Parameter]] | None
) -> dict[Parameter, str]:
    """Return the names of the optimizer's parameters. Raises ConfigurationError if `named` does not match them."""
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
