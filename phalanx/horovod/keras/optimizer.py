"""A Keras optimizer that merges gradients over the ranks first. Names and meaning are Horovod's."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.horovod.compression import Compression
from phalanx.horovod.instance_numbers import InstanceNumber
from phalanx.horovod.keras import fit_hook
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Average, check_op
from phalanx.horovod.process_sets import ProcessSet, global_process_set
from phalanx.keras_compat.patching import insert_mixin, remove_mixin, set_untracked

_MODULES = {"jax": "jax", "tensorflow": "tensorflow.tape", "torch": "torch.gradients"}
_state = threading.local()


@dataclass(frozen=True)
class MergeOptions:
    """How gradients are merged: the arguments of `DistributedOptimizer` of these names.

    Attributes:
        local: identities of the variables whose gradients stay this rank's own.
    """

    compression: Any
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: HorovodOp
    process_set: ProcessSet
    number: InstanceNumber
    factor: float = 1.0
    scale_local_gradients: bool = True
    local: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Of the collective."""
        return f"keras.optimizer.{int(self.number)}.gradients"

    @property
    def name_of_agreement(self) -> str:
        """Of the collective in which ranks tell whether their gradients are finite."""
        return f"keras.optimizer.{int(self.number)}.finite"

    def merge(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Gradients of the backend that Keras runs on, merged over the ranks; None stays None.

        Args:
            variables: theirs; needed where some are `local`.
        """
        # First of all: PyTorch's are merged in place, and may have memory in common with those that are not.
        own = {
            index: None if gradients[index] is None else gradients[index] * self.own_factor
            for index in self.locals_of(variables)
        }
        merged = self._merge([None if index in own else each for index, each in enumerate(gradients)])
        for index, gradient in own.items():
            merged[index] = gradient
        return merged

    def locals_of(self, variables: Sequence[Any]) -> set[int]:
        """Which of these variables are `local`, by place."""
        return {index for index, variable in enumerate(variables) if id(variable) in self.local}

    @property
    def own_factor(self) -> float:
        """For gradients that stay this rank's own."""
        return self.factor / self.process_set.size() if self.scale_local_gradients else self.factor

    def _merge(self, gradients: Sequence[Any]) -> list[Any]:
        merged = self._merged_by_members(gradients) if self.process_set.included() else list(gradients)
        if self.factor == 1.0:
            return merged
        return [None if gradient is None else gradient * self.factor for gradient in merged]

    def _merged_by_members(self, gradients: Sequence[Any]) -> list[Any]:
        module = importlib.import_module(f"phalanx.horovod.{_MODULES[keras.backend.backend()]}")
        merged: list[Any] = module.merge_gradients(
            gradients,
            compression=self.compression,
            sparse_as_dense=self.sparse_as_dense,
            op=self.op,
            gradient_predivide_factor=self.gradient_predivide_factor,
            process_set=self.process_set,
            name=self.name,
        )
        return merged


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
    """The Keras optimizer, which merges the gradients over the ranks before it applies them.

    It is the same object, of a subclass of its class with the same name, so that a saved model can be loaded without
    Horovod's interface; its state stays. Works on every backend, in `model.fit` and in loops of one's own that call
    `apply` or `apply_gradients`; on JAX those calls must be outside of `jax.jit`.

    Args:
        optimizer: any Keras optimizer.
        name: means nothing here, as `device_dense`, `device_sparse`, `num_groups` and `groups`: all gradients travel as
            one.
        compression: see `Compression`.
        sparse_as_dense: on TensorFlow, make `tf.IndexedSlices` dense instead of gathering all ranks' slices.
        gradient_predivide_factor: an average divides by this before the sum, and by the rest after it.
        op: how to merge.
        backward_passes_per_step: batches whose gradients add up before a step (Keras's `gradient_accumulation_steps`,
            which may also have been set already). They are merged once, for that step. Inside a `LossScaleOptimizer`,
            ranks also agree at each batch on whether its gradients are finite everywhere; outside of `fit` on JAX they
            are merged at each batch there.
        average_aggregated_gradients: whether those are averaged instead.
        process_set: the ranks that train together; others train by themselves.
        scale_local_gradients: whether gradients that are not merged (`optimizer.register_local_var(variable)`) are
            divided by the number of ranks, as those that are averaged have been.

    Raises: ConfigurationError if arguments do not fit together.
    """
    op = check_op(op)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"DistributedOptimizer got {type(optimizer).__name__}, which is no Keras optimizer. For torch.optim use "
            f"phalanx.horovod.torch, for Optax phalanx.horovod.jax."
        )
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ConfigurationError(f"gradient_predivide_factor is for op Average, not {op.value}.")
    if isinstance(optimizer, _Merging):
        raise ConfigurationError("this optimizer is a DistributedOptimizer already.")
    factor = 1.0
    if backward_passes_per_step > 1:
        accumulating = innermost(optimizer)
        if accumulating.built or accumulating.gradient_accumulation_steps:
            raise ConfigurationError(
                "backward_passes_per_step sets the optimizer's gradient_accumulation_steps, which must not be set yet, "
                "and before the optimizer has been built."
            )
        accumulating.gradient_accumulation_steps = backward_passes_per_step
        if not average_aggregated_gradients:
            factor = float(backward_passes_per_step)
    number = InstanceNumber("keras.optimizer", process_set)
    way = MergeOptions(
        compression, sparse_as_dense, gradient_predivide_factor, op, process_set, number, factor, scale_local_gradients
    )
    make_merging(optimizer, way)
    way_of(optimizer)
    fit_hook.install()
    return optimizer


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
        local_layers: a layer, or several, which are built; None: none.
    """
    merging = DistributedOptimizer(
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
            merging.register_local_var(variable)
    return merging


def make_merging(optimizer: Any, way: MergeOptions) -> None:
    """Let the optimizer merge gradients first, from now on."""
    insert_mixin(optimizer, _Merging)
    set_untracked(optimizer, _hvd_way=way)


def way_of(optimizer: Any) -> MergeOptions | None:
    """How an optimizer merges gradients; None if it does not.

    One around it (loss scaling) takes that over: it looks at gradients first, and must see everybody's. But where the
    inner one accumulates, it merges once for each update, and the one around it asks the others what they have seen.
    """
    present = optimizer
    while isinstance(present, keras.optimizers.LossScaleOptimizer) and not isinstance(present, _Merging):
        present = present.inner_optimizer
    if not isinstance(present, _Merging):
        return None
    way: MergeOptions = vars(present)["_hvd_way"]
    inner = innermost(optimizer)
    agree = inner is not optimizer and accumulation_of(inner) > 1 and keras.backend.backend() != "jax"
    wanted = inner if agree else optimizer
    if present is not wanted:
        remove_mixin(present)
        make_merging(wanted, way)
    if agree and not isinstance(optimizer, _Agreeing):
        insert_mixin(optimizer, _Agreeing)
        set_untracked(optimizer, _hvd_way=way)
    return way


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates variables, inside of those that scale losses."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


@contextmanager
def merged_already() -> Iterator[None]:
    """Inside, optimizers get gradients that are merged, and apply them as they are."""
    before = getattr(_state, "merged", False)
    _state.merged = True
    try:
        yield
    finally:
        _state.merged = before


@contextmanager
def _merged_at_update(optimizer: Any) -> Iterator[None]:
    """Inside, this optimizer merges gradients where it updates, not before it accumulates them."""
    _state.at_update = optimizer
    try:
        yield
    finally:
        _state.at_update = _state.variables = None


class _Merging:
    """Before a Keras optimizer's class."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """See `keras.optimizers.Optimizer.apply`."""
        grads = list(grads)
        if not getattr(_state, "merged", False):
            way: MergeOptions = vars(self)["_hvd_way"]
            steps = accumulation_of(self)
            if steps > 1 and keras.backend.backend() != "jax":
                with merged_already(), _merged_at_update(self):
                    return super().apply(grads, trainable_variables)  # type: ignore[misc]
            known = getattr(self, "_trainable_variables", ())
            variables = known if trainable_variables is None else list(trainable_variables)
            try:
                if steps > 1 and not self._hvd_take_accumulated(grads, trainable_variables, steps):
                    merged = grads
                else:
                    merged = way.merge(grads, variables)
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"A DistributedOptimizer was applied inside a function that JAX compiles. `fit` takes "
                    f"care of that; in a loop of your own, merge the gradients outside. ({error})"
                ) from error
            # An optimizer around or inside of this one gets them merged.
            with merged_already():
                return super().apply(merged, trainable_variables)  # type: ignore[misc]
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        """What Keras calls with the gradients of an update, accumulated or not, before it clips them: but on JAX, only
        in the branch that updates."""
        if getattr(_state, "at_update", None) is self:
            way: MergeOptions = vars(self)["_hvd_way"]
            grads = way.merge(grads, _state.variables)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        """What Keras calls with the variables that have gradients, before `_clip_gradients`."""
        if getattr(_state, "at_update", None) is self:
            _state.variables = trainable_variables
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def register_local_var(self, variable: Any) -> None:
        """Gradients of this variable are not merged."""
        vars(self)["_hvd_way"].local.add(id(variable))

    def _hvd_take_accumulated(self, grads: list[Any], trainable_variables: Any, steps: int) -> bool:
        """On JAX, outside of compiled functions: if this is the step that updates, add what was accumulated before to
        the gradients, in place, and take it from the optimizer.

        There Keras does an update at every step and drops most of them, so `_clip_gradients` says nothing.
        """
        optimizer: Any = self
        iterations = optimizer._iterations.value
        if is_tracer(iterations) or any(map(is_tracer, grads)):
            return True  # it will be refused
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


class _Agreeing:
    """Before the class of a `LossScaleOptimizer`, around an optimizer that accumulates: a batch that is not finite on
    one rank is left out on all, so that all update after the same batch."""

    def check_finite(self, grads: Any) -> Any:
        """See `keras.optimizers.LossScaleOptimizer.check_finite`."""
        finite = super().check_finite(grads)  # type: ignore[misc]
        way: MergeOptions = vars(self)["_hvd_way"]
        if not way.process_set.included():
            return finite
        hvd = importlib.import_module(f"phalanx.horovod.{keras.backend.backend()}")
        least = hvd.allreduce(
            keras.ops.cast(finite, "uint8"), op=hvd.Min, process_set=way.process_set, name=way.name_of_agreement
        )
        return keras.ops.cast(least, "bool")


def accumulation_of(optimizer: Any) -> int:
    """Over how many steps an optimizer accumulates gradients by itself, without another's around it."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def is_tracer(value: Any) -> bool:
    """Whether JAX is compiling a function that this value belongs to."""
    import jax

    return isinstance(value, jax.core.Tracer)
