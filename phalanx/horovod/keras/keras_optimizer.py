"""A Keras optimizer that reduces gradients over the ranks first. Names and meaning are Horovod's."""

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
"""Where a backend's `reduce_gradients` is."""
_state = threading.local()
"""While this thread applies an optimizer. `is_reduced`: gradients are applied as they are. `updating`: the optimizer
that reduces in `_clip_gradients`, and `variables`: those whose gradients these are."""


@dataclass(frozen=True)
class OptimizerReduction:
    """How one optimizer reduces its gradients.

    Attributes:
        reduction: how gradients are reduced.
        number: of the optimizer, in names of collectives.
        factor: multiplies reduced gradients.
        scale_local_gradients: whether gradients that are not reduced are divided by the number of ranks.
        local: identities of the variables whose gradients are not reduced.
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
        """Name of the collective that finds out whether the gradients of all ranks are finite."""
        return f"keras.optimizer.{int(self.number)}.finite"

    @property
    def is_included(self) -> bool:
        """Whether this rank trains with others."""
        return self.reduction.process_set.included()

    @property
    def local_factor(self) -> float:
        """Multiplies gradients that are not reduced. A rank that trains alone averages nothing, and scales nothing."""
        scales = self.scale_local_gradients and self.is_included
        return self.factor / self.reduction.process_set.size() if scales else self.factor

    def local_indices(self, variables: Sequence[Any]) -> set[int]:
        """The indices of those variables whose gradients are not reduced."""
        return {index for index, variable in enumerate(variables) if id(variable) in self.local}

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Reduced gradients; None stays None.

        Args:
            gradients: of the backend that Keras runs on.
            variables: their variables; needed if some gradients are not reduced.
        """
        # Local ones first: PyTorch's are reduced in place, and may share memory with those that are not.
        local = {
            index: None if gradients[index] is None else _scaled(gradients[index], self.local_factor)
            for index in self.local_indices(variables)
        }
        reduced = [None if index in local else each for index, each in enumerate(gradients)]
        if self.is_included:
            # Imported by name: the modules of other backends need packages that may not be installed.
            module = importlib.import_module(f"phalanx.horovod.{_MODULES[keras.backend.backend()]}")
            reduced = module.reduce_gradients(reduced, self.reduction, self.name)
        if self.factor != 1.0:
            reduced = [None if gradient is None else _scaled(gradient, self.factor) for gradient in reduced]
        for index, gradient in local.items():
            reduced[index] = gradient
        return reduced


def _scaled(gradient: Any, factor: float) -> Any:
    """A gradient, which may be rows of an embedding (`tf.IndexedSlices`), times a factor; in memory of its own."""
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
    """The Keras optimizer, which reduces the gradients over the ranks before it applies them.

    It is the same object, of a subclass of its class with the same name, so that a saved model can be loaded without
    Horovod's interface; its state is kept. It works on every backend, in `model.fit` and in custom loops that call
    `apply` or `apply_gradients`; on JAX those calls must be outside of `jax.jit`.

    Args:
        optimizer: any Keras optimizer.
        name: ignored, as `device_dense`, `device_sparse`, `num_groups` and `groups`: all gradients travel together.
        compression: a compressor, see `Compression`.
        sparse_as_dense: on TensorFlow, whether `tf.IndexedSlices` are made dense instead of gathering the slices of all
            ranks.
        gradient_predivide_factor: see `GradientReduction`.
        op: the reduction.
        backward_passes_per_step: batches whose gradients add up before a step (Keras's `gradient_accumulation_steps`,
            which may also have been set already). They are reduced once, for that step. Inside a `LossScaleOptimizer`,
            ranks also agree for each batch on whether its gradients are finite everywhere; outside of `fit` on JAX,
            gradients are reduced for each batch there.
        average_aggregated_gradients: whether the gradients of those batches are averaged instead.
        process_set: the ranks that train together; others train by themselves.
        scale_local_gradients: whether gradients that are not reduced (`optimizer.register_local_var(variable)`) are
            divided by the number of ranks, as averaged ones are.

    Raises: ConfigurationError if options contradict each other.
    """
    reduction = GradientReduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    aggregation = Aggregation(backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)
    return distribute_optimizer(optimizer, reduction, aggregation)


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
    """As `DistributedOptimizer`, but gradients of some layers stay each rank's own.

    Args:
        local_layers: a layer, or several, which must be built; None for none.
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


class Aggregation(NamedTuple):
    """The options of a distributed Keras optimizer besides its `GradientReduction`.

    Attributes:
        passes: batches whose gradients add up before a step.
        averages: whether the gradients of those batches are averaged instead.
        scales_local: whether gradients that are not reduced are divided by the number of ranks.
    """

    passes: int
    averages: bool
    scales_local: bool


def distribute_optimizer(optimizer: Any, reduction: GradientReduction, aggregation: Aggregation) -> Any:
    """See `DistributedOptimizer`."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"DistributedOptimizer got {type(optimizer).__name__}, which is no Keras optimizer. For torch.optim use "
            f"phalanx.horovod.torch, for Optax phalanx.horovod.jax."
        )
    if isinstance(optimizer, _ReducingOptimizer):
        raise ConfigurationError("this optimizer is a DistributedOptimizer already.")
    refuse_overwritten(getattr(optimizer, "_trainable_variables", ()), "a DistributedOptimizer")
    factor = 1.0
    if aggregation.passes > 1:
        accumulating = inner_optimizer(optimizer)
        if accumulating.built or accumulating.gradient_accumulation_steps:
            raise ConfigurationError(
                "backward_passes_per_step sets the optimizer's gradient_accumulation_steps, which must not be set yet, "
                "and before the optimizer has been built."
            )
        accumulating.gradient_accumulation_steps = aggregation.passes
        if not aggregation.averages:
            factor = float(aggregation.passes)  # Keras averages what it accumulates; this makes it the sum again
    number = InstanceNumber("keras.optimizer", reduction.process_set)
    _insert_class(
        optimizer, _ReducingOptimizer, OptimizerReduction(reduction, number, factor, aggregation.scales_local)
    )
    settle_reduction(optimizer)
    fit_hook.install()
    return optimizer


def _insert_class(optimizer: Any, mixin: type, reduction: OptimizerReduction) -> None:
    """Put a class before the optimizer's own, and remember how gradients are reduced."""
    insert_mixin(optimizer, mixin)
    type(optimizer)._hvd_reduction = reduction


def settle_reduction(optimizer: Any) -> OptimizerReduction | None:
    """Move the reduction to the optimizer that must do it, and return it; None if the optimizer does not reduce.

    A `LossScaleOptimizer` around a distributed one takes that over, since it checks whether gradients are finite, those
    of all ranks. But if the inner one accumulates, the inner one reduces, once for each update, and the outer one asks
    the other ranks whether theirs are finite.
    """
    present = optimizer
    # The outermost optimizer that has the mixin: where it was inserted, or where an earlier call has moved it.
    while isinstance(present, keras.optimizers.LossScaleOptimizer) and not isinstance(present, _ReducingOptimizer):
        present = present.inner_optimizer
    if not isinstance(present, _ReducingOptimizer):
        return None
    reduction: OptimizerReduction = type(present)._hvd_reduction
    inner = inner_optimizer(optimizer)
    # On JAX `fit_hook` does both, between two compiled functions.
    asks = inner is not optimizer and own_accumulation_steps(inner) > 1 and keras.backend.backend() != "jax"
    reducing = inner if asks else optimizer
    if present is not reducing:
        remove_mixin(present)
        _insert_class(reducing, _ReducingOptimizer, reduction)
    if asks and not isinstance(optimizer, _JointlyFinite):
        _insert_class(optimizer, _JointlyFinite, reduction)
    return reduction


@contextmanager
def already_reduced() -> Iterator[None]:
    """Inside, optimizers apply gradients as they are."""
    before = getattr(_state, "is_reduced", False)
    _state.is_reduced = True
    try:
        yield
    finally:
        _state.is_reduced = before


@contextmanager
def _reducing_at_update(optimizer: Any) -> Iterator[None]:
    """Inside, this optimizer reduces gradients when it updates, not before it accumulates them."""
    _state.updating = optimizer
    try:
        yield
    finally:
        _state.updating = _state.variables = None


class _DistributedClass:
    """Base of the classes that precede an optimizer's own. Each optimizer has one for itself, with its reduction."""

    _hvd_reduction: ClassVar[OptimizerReduction]

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """See `keras.optimizers.Optimizer.from_config`. What it makes reduces as the optimizer of this class does."""
        return _reducing_like(cls, _plain_class(cls).from_config(*args, **kwargs))

    def __reduce__(self) -> Any:
        """As a saved optimizer, a pickled one is plain; the class of this one could not be found by its name."""
        reduced: Any = super().__reduce__()
        return _plain_class(type(self))._unpickle_model, reduced[1]

    def __copy__(self) -> Any:
        """A copy reduces, too. Keras would make a plain optimizer, with which each rank trains by itself."""
        make, arguments = self.__reduce__()
        return _reducing_like(type(self), make(*arguments))

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()


def _plain_class(kind: Any) -> Any:
    while issubclass(kind, _DistributedClass):  # a `LossScaleOptimizer` may have two of them
        kind = kind.__bases__[1]
    return kind


def _reducing_like(kind: Any, optimizer: Any) -> Any:
    """A plain optimizer, which now reduces as those of this class do."""
    known: OptimizerReduction = kind._hvd_reduction
    number = InstanceNumber("keras.optimizer", known.reduction.process_set)
    reduction = replace(known, number=number, local=set(known.local))
    asks = issubclass(kind, _JointlyFinite)
    _insert_class(inner_optimizer(optimizer) if asks else optimizer, _ReducingOptimizer, reduction)
    if asks:
        _insert_class(optimizer, _JointlyFinite, reduction)
    return optimizer


class _ReducingOptimizer(_DistributedClass):
    """Precedes a Keras optimizer's class among the bases."""

    def build(self, variables: Any) -> None:
        """See `keras.optimizers.Optimizer.build`."""
        refuse_overwritten(variables, "a DistributedOptimizer")
        super().build(variables)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """See `keras.optimizers.Optimizer.apply`."""
        grads = list(grads)
        if getattr(_state, "is_reduced", False):
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        steps = own_accumulation_steps(self)
        if steps > 1 and keras.backend.backend() != "jax":
            # Keras accumulates the gradients as they are, and calls `_clip_gradients` below at the update.
            with already_reduced(), _reducing_at_update(self):
                return super().apply(grads, trainable_variables)  # type: ignore[misc]
        known = getattr(self, "_trainable_variables", ())
        try:
            if steps == 1 or self._hvd_take_accumulated(grads, trainable_variables, steps):
                variables = known if trainable_variables is None else list(trainable_variables)
                grads = type(self)._hvd_reduction.reduce(grads, variables)
        except UnsupportedError as error:
            if keras.backend.backend() != "jax":
                raise
            raise UnsupportedError(
                f"A DistributedOptimizer was applied inside a function that JAX compiles. `fit` takes care of that; in "
                f"a custom loop, reduce the gradients outside. ({error})"
            ) from error
        # An optimizer around or inside of this one gets reduced gradients.
        with already_reduced():
            return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """Reduce first. Keras calls this with the gradients of an update, accumulated or not; except on JAX, only in
        the branch that updates."""
        if getattr(_state, "updating", None) is self:
            grads = type(self)._hvd_reduction.reduce(grads, _state.variables)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        """Note the variables that have gradients, with which Keras calls this before `_clip_gradients`."""
        if getattr(_state, "updating", None) is self:
            _state.variables = trainable_variables
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def register_local_var(self, variable: Any) -> None:
        """Do not reduce the gradients of this variable."""
        type(self)._hvd_reduction.local.add(id(variable))

    def _hvd_take_accumulated(self, grads: list[Any], trainable_variables: Any, steps: int) -> bool:
        """On JAX, outside of compiled functions: at the step that updates, move what was accumulated before from the
        optimizer into the gradients. Returns whether it is that step.

        On JAX, Keras computes an update at every step and drops most of them, so `_clip_gradients` does not tell.
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


class _JointlyFinite(_DistributedClass):
    """Precedes the class of a `LossScaleOptimizer` around an optimizer that accumulates.

    A batch whose gradients are not finite on one rank is left out on all, so that all update after the same batch.
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


def own_accumulation_steps(optimizer: Any) -> int:
    """Over how many steps an optimizer itself accumulates gradients."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)
