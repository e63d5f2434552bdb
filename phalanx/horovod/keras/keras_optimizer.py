"""A Keras optimizer that first reduces the gradients over the ranks. Names and semantics are Horovod's."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import keras

from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.compressors import Compression
from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.instance_numbers import InstanceNumber
from phalanx.horovod.jax_tracers import is_tracer
from phalanx.horovod.keras import fit_hook
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Average
from phalanx.keras_compat.global_batch.global_gradients import refuse_overwritten
from phalanx.keras_compat.model_state import inner_optimizer
from phalanx.keras_compat.patching import insert_mixin, remove_mixin

_MODULES = {"jax": "jax", "tensorflow": "tensorflow.tape", "torch": "torch.gradients"}
"""Module of each backend's `reduce_gradients`."""
_state = threading.local()
"""State while this thread applies an optimizer. `is_reduced`: whether gradients are applied as they are. `updating`:
the optimizer that reduces in `_clip_gradients`; `variables`: the variables of its gradients."""


@dataclass(frozen=True)
class OptimizerReduction:
    """How one optimizer reduces its gradients.

    Attributes:
        reduction: The reduction of the gradients.
        number: Number of the optimizer in the names of collectives.
        factor: Factor that multiplies reduced gradients.
        scale_local_gradients: Whether gradients that are not reduced are divided by the number of ranks.
        local: Identities of the variables whose gradients are not reduced.
    """

    reduction: GradientReduction
    number: InstanceNumber
    factor: float = 1.0
    scale_local_gradients: bool = True
    local: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Name of the collective that reduces the gradients."""
        return f"keras.optimizer.{int(self.number)}.gradients"

    @property
    def finite_name(self) -> str:
        """Name of the collective that checks whether the gradients of all ranks are finite."""
        return f"keras.optimizer.{int(self.number)}.finite"

    @property
    def is_included(self) -> bool:
        """Whether this rank trains with other ranks."""
        return self.reduction.process_set.included()

    @property
    def local_factor(self) -> float:
        """Factor for gradients that are not reduced. A rank that trains alone does not average or scale."""
        scales = self.scale_local_gradients and self.is_included
        return self.factor / self.reduction.process_set.size() if scales else self.factor

    def local_indices(self, variables: Sequence[Any]) -> set[int]:
        """Return the indices of the variables whose gradients are not reduced."""
        return {index for index, variable in enumerate(variables) if id(variable) in self.local}

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Reduce gradients; None stays None.

        Args:
            gradients: Tensors of the backend that Keras runs on.
            variables: Their variables; needed if some gradients are not reduced.
        """
        # Local ones first: PyTorch gradients are reduced in place, and may share memory with local ones.
        local = {
            index: None if gradients[index] is None else _scale(gradients[index], self.local_factor)
            for index in self.local_indices(variables)
        }
        reduced = [None if index in local else each for index, each in enumerate(gradients)]
        if self.is_included:
            # Imported by name: the modules of the other backends need packages that may not be installed.
            module = importlib.import_module(f"phalanx.horovod.{_MODULES[keras.backend.backend()]}")
            reduced = module.reduce_gradients(reduced, self.reduction, self.name)
        if self.factor != 1.0:
            reduced = [None if gradient is None else _scale(gradient, self.factor) for gradient in reduced]
        for index, gradient in local.items():
            reduced[index] = gradient
        return reduced


def _scale(gradient: Any, factor: float) -> Any:
    """Return a scaled copy of a gradient, which may be rows of an embedding (`tf.IndexedSlices`)."""
    if hasattr(gradient, "dense_shape"):
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: HorovodOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer reduce the gradients over the ranks before it applies them.

    Returns the same object with its state. Its class becomes a subclass with the same name, so a saved model can be
    loaded without Horovod's interface. It works on every backend, in `model.fit` and in custom loops that call `apply`
    or `apply_gradients`; on JAX those calls must be outside of `jax.jit`.

    Args:
        optimizer: Any Keras optimizer.
        name: Ignored, as are `device_dense`, `device_sparse`, `num_groups` and `groups`: all gradients are fused.
        compression: A compressor, see `Compression`.
        sparse_as_dense: Whether `tf.IndexedSlices` of TensorFlow become dense tensors, instead of gathering the slices
            of all ranks.
        gradient_predivide_factor: See `GradientReduction`.
        op: The reduction.
        backward_passes_per_step: Number of batches whose gradients are summed before a step (Keras's
            `gradient_accumulation_steps`, which may already be set). The sum is reduced once, for that step. Inside a
            `LossScaleOptimizer`, ranks also agree for each batch on whether all gradients are finite; outside of `fit`
            on JAX, it reduces the gradients of each batch.
        average_aggregated_gradients: Whether the gradients of those batches are averaged instead.
        process_set: The ranks that train together; other ranks train alone.
        scale_local_gradients: Whether gradients that are not reduced (`optimizer.register_local_var(variable)`) are
            divided by the number of ranks, as averaged gradients are.

    Raises: ConfigurationError if options contradict each other.
    """
    reduction = GradientReduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    options = OptimizerOptions(backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)
    return distribute_optimizer(optimizer, reduction, options)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: HorovodOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Do the same as `DistributedOptimizer`, but keep the gradients of some layers local to each rank.

    Args:
        local_layers: One or more built layers; None for none.
    """
    distributed = DistributedOptimizer(
        optimizer,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or ())
    for layer in layers:
        if not layer.built:
            raise ConfigurationError(f"the local layer {layer.name!r} is not built: its variables are not known.")
        for variable in layer.trainable_variables:
            distributed.register_local_var(variable)
    return distributed


class OptimizerOptions(NamedTuple):
    """The options of a distributed Keras optimizer that are not in its `GradientReduction`.

    Attributes:
        backward_passes_per_step: Number of batches whose gradients are summed before a step.
        average_aggregated_gradients: Whether the gradients of those batches are averaged instead.
        scale_local_gradients: Whether gradients that are not reduced are divided by the number of ranks.
    """

    backward_passes_per_step: int
    average_aggregated_gradients: bool
    scale_local_gradients: bool


def distribute_optimizer(optimizer: Any, reduction: GradientReduction, options: OptimizerOptions) -> Any:
    """See `DistributedOptimizer`."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"DistributedOptimizer got {type(optimizer).__name__}, which is no Keras optimizer. For torch.optim use "
            f"phalanx.horovod.torch, for Optax phalanx.horovod.jax."
        )
    if isinstance(optimizer, _GradientReductionMixin):
        raise ConfigurationError("this optimizer is a DistributedOptimizer already.")
    refuse_overwritten(getattr(optimizer, "_trainable_variables", ()), "a DistributedOptimizer")
    factor = 1.0
    if options.backward_passes_per_step > 1:
        accumulating = inner_optimizer(optimizer)
        if accumulating.built or accumulating.gradient_accumulation_steps:
            raise ConfigurationError(
                "backward_passes_per_step sets the optimizer's gradient_accumulation_steps, which must not be set yet, "
                "and before the optimizer has been built."
            )
        accumulating.gradient_accumulation_steps = options.backward_passes_per_step
        if not options.average_aggregated_gradients:
            # Keras averages what it accumulates; this restores the sum.
            factor = float(options.backward_passes_per_step)
    number = InstanceNumber("keras.optimizer", reduction.process_set)
    _insert_class(
        optimizer, _GradientReductionMixin, OptimizerReduction(reduction, number, factor, options.scale_local_gradients)
    )
    place_reduction(optimizer)
    fit_hook.install()
    return optimizer


def _insert_class(optimizer: Any, mixin: type, reduction: OptimizerReduction) -> None:
    """Insert a class before the optimizer's class, and store the reduction on the result."""
    insert_mixin(optimizer, mixin)
    type(optimizer)._hvd_reduction = reduction


def place_reduction(optimizer: Any) -> OptimizerReduction | None:
    """Place the reduction in the optimizer that must do it, and return it; None if the optimizer does not reduce.

    A `LossScaleOptimizer` around a distributed optimizer takes over the reduction, because it checks whether the
    gradients of all ranks are finite. But if the inner optimizer accumulates, the inner one reduces, once per update,
    and the outer one agrees with the other ranks on whether all gradients are finite.
    """
    present = optimizer
    # The outermost optimizer with the mixin: where it was inserted, or where an earlier call moved it.
    while isinstance(present, keras.optimizers.LossScaleOptimizer) and not isinstance(present, _GradientReductionMixin):
        present = present.inner_optimizer
    if not isinstance(present, _GradientReductionMixin):
        return None
    reduction: OptimizerReduction = type(present)._hvd_reduction
    inner = inner_optimizer(optimizer)
    # On JAX, `fit_hook` does both between two compiled functions.
    checks_jointly = inner is not optimizer and accumulation_steps_of(inner) > 1 and keras.backend.backend() != "jax"
    reducing = inner if checks_jointly else optimizer
    if present is not reducing:
        remove_mixin(present)
        _insert_class(reducing, _GradientReductionMixin, reduction)
    if checks_jointly and not isinstance(optimizer, _FiniteCheckMixin):
        _insert_class(optimizer, _FiniteCheckMixin, reduction)
    return reduction


@contextmanager
def already_reduced() -> Iterator[None]:
    """Within the context, optimizers apply gradients as they are."""
    before = getattr(_state, "is_reduced", False)
    _state.is_reduced = True
    try:
        yield
    finally:
        _state.is_reduced = before


@contextmanager
def _reducing_at_update(optimizer: Any) -> Iterator[None]:
    """Within the context, this optimizer reduces gradients when it updates, not before it accumulates them."""
    _state.updating = optimizer
    try:
        yield
    finally:
        _state.updating = _state.variables = None


class _DistributedMixin:
    """Base of the mixins. Each optimizer has a separate class, which holds its reduction."""

    _hvd_reduction: ClassVar[OptimizerReduction]

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """See `keras.optimizers.Optimizer.from_config`. The result reduces as the optimizer of this class does."""
        return _make_reducing_like(cls, _plain_class(cls).from_config(*args, **kwargs))

    def __reduce__(self) -> Any:
        """Pickle a plain optimizer, as saving does: the class of this one could not be found by name."""
        reduced: Any = super().__reduce__()
        return _plain_class(type(self))._unpickle_model, reduced[1]

    def __copy__(self) -> Any:
        """Return a copy that also reduces. Keras would create a plain optimizer, so each rank would train alone."""
        make, arguments = self.__reduce__()
        return _make_reducing_like(type(self), make(*arguments))

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()


def _plain_class(kind: Any) -> Any:
    while issubclass(kind, _DistributedMixin):  # a `LossScaleOptimizer` may have two of them
        kind = kind.__bases__[1]
    return kind


def _make_reducing_like(kind: Any, optimizer: Any) -> Any:
    """Make a plain optimizer reduce as the optimizer of this class does."""
    known: OptimizerReduction = kind._hvd_reduction
    number = InstanceNumber("keras.optimizer", known.reduction.process_set)
    reduction = replace(known, number=number, local=set(known.local))
    checks_jointly = issubclass(kind, _FiniteCheckMixin)
    _insert_class(inner_optimizer(optimizer) if checks_jointly else optimizer, _GradientReductionMixin, reduction)
    if checks_jointly:
        _insert_class(optimizer, _FiniteCheckMixin, reduction)
    return optimizer


class _GradientReductionMixin(_DistributedMixin):
    """Mixin before a Keras optimizer's class among the bases."""

    def build(self, variables: Any) -> None:
        """See `keras.optimizers.Optimizer.build`."""
        refuse_overwritten(variables, "a DistributedOptimizer")
        super().build(variables)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """See `keras.optimizers.Optimizer.apply`."""
        grads = list(grads)
        if getattr(_state, "is_reduced", False):
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        steps = accumulation_steps_of(self)
        if steps > 1 and keras.backend.backend() != "jax":
            # Keras accumulates the unreduced gradients, and calls `_clip_gradients` below at the update.
            with already_reduced(), _reducing_at_update(self):
                return super().apply(grads, trainable_variables)  # type: ignore[misc]
        known = getattr(self, "_trainable_variables", ())
        try:
            if steps == 1 or self._hvd_pop_accumulated(grads, trainable_variables, steps):
                variables = known if trainable_variables is None else list(trainable_variables)
                grads = type(self)._hvd_reduction.reduce(grads, variables)
        except UnsupportedError as error:
            if keras.backend.backend() != "jax":
                raise
            raise UnsupportedError(
                f"A DistributedOptimizer was applied inside a function that JAX compiles. `fit` takes care of that; in "
                f"a custom loop, reduce the gradients outside. ({error})"
            ) from error
        # An optimizer around or inside this one receives reduced gradients.
        with already_reduced():
            return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """Reduce before clipping. Keras passes the gradients of an update, accumulated or not; except on JAX, it calls
        this only in the branch that updates."""
        if getattr(_state, "updating", None) is self:
            grads = type(self)._hvd_reduction.reduce(grads, _state.variables)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        """Record the variables that have gradients. Keras calls this before `_clip_gradients`."""
        if getattr(_state, "updating", None) is self:
            _state.variables = trainable_variables
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def register_local_var(self, variable: Any) -> None:
        """Do not reduce the gradients of this variable."""
        type(self)._hvd_reduction.local.add(id(variable))

    def _hvd_pop_accumulated(self, grads: list[Any], trainable_variables: Any, steps: int) -> bool:
        """Move the accumulated gradients from the optimizer into `grads` if this step updates; return whether it does.

        For JAX, outside of compiled functions. There, Keras computes an update at every step and drops most of them, so
        a call of `_clip_gradients` does not identify the step that updates.
        """
        optimizer: Any = self
        iterations = optimizer._iterations.value
        if is_tracer(iterations) or any(map(is_tracer, grads)):
            return True  # the reduction will raise
        if (int(iterations) + 1) % steps:
            return False
        accumulators = optimizer._accumulated_gradients
        if trainable_variables is not None:
            accumulators = [accumulators[optimizer._get_variable_index(v)] for v in trainable_variables]
        for index, (gradient, accumulator) in enumerate(zip(list(grads), accumulators, strict=True)):
            if gradient is not None and accumulator is not None:
                grads[index] = gradient + accumulator.value
                accumulator.assign(keras.ops.zeros_like(accumulator.value))
        return True


class _FiniteCheckMixin(_DistributedMixin):
    """Mixin before the class of a `LossScaleOptimizer` around an optimizer that accumulates.

    A batch whose gradients are not finite on one rank is skipped on all, so that all ranks update after the same batch.
    """

    def check_finite(self, grads: Any) -> Any:
        """See `keras.optimizers.LossScaleOptimizer.check_finite`."""
        finite = super().check_finite(grads)  # type: ignore[misc]
        reduction: OptimizerReduction = type(self)._hvd_reduction
        if not reduction.is_included:
            return finite
        hvd = importlib.import_module(f"phalanx.horovod.{keras.backend.backend()}")
        least = hvd.allreduce(
            keras.ops.cast(finite, "uint8"),
            op=hvd.Min,
            process_set=reduction.reduction.process_set,
            name=reduction.finite_name,
        )
        return keras.ops.cast(least, "bool")


def accumulation_steps_of(optimizer: Any) -> int:
    """Return the number of steps over which this optimizer, not one inside it, accumulates gradients."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)
