"""Makes Keras's `fit` train with a `DistributedOptimizer`: installs a train function that can wait for other ranks.

- TensorFlow: Keras's train function, but without XLA, which cannot call the host.
- PyTorch: Keras's train function, unchanged.
- JAX: A compiled function cannot wait for other processes. The engine's two functions, with the reduction between them
  (`phalanx.engines.replica.jax.jax_engine`), replace the train function; the rest of `fit` is Keras's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from phalanx.engines import make_engine
from phalanx.engines.engine import Merge
from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.horovod import operations, step_reports
from phalanx.horovod.compressors import run_compressed
from phalanx.horovod.operation_request import OperationKind
from phalanx.keras_compat import trainer_hook
from phalanx.keras_compat.global_batch.global_gradients import refuse_overwritten
from phalanx.keras_compat.model_state import inner_optimizer
from phalanx.keras_compat.patching import set_untracked
from phalanx.monitoring import timeline
from phalanx.training import model_dispatch
from phalanx.training.steps.gradient_merge import MergeBuffers

Array = np.ndarray[Any, Any]


def install() -> None:
    """Make `fit` use these train functions for models with a DistributedOptimizer; safe to call again."""
    trainer_hook.choose_train_function(_train_function)


def _train_function(model: Any, make: Callable[[], None]) -> Callable[..., Any] | None:
    """Return the train function for `fit`; None for the one that Keras builds (`make`)."""
    from phalanx.horovod.keras.keras_optimizer import place_reduction

    reduction = place_reduction(model.optimizer)
    if reduction is None or model_dispatch.member_of(model) is not None:
        return None
    backend = keras.backend.backend()
    if backend == "jax":
        return _JaxTrainFunction(model, reduction)
    with _without_xla(model) if backend == "tensorflow" else contextlib.nullcontext():
        make()
    return step_reports.record_train_function(model.train_function)


@contextlib.contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    before = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = before


class _JaxTrainFunction:
    """Replaces Keras's train function on JAX: `(state, iterator) -> (logs, state)`."""

    def __init__(self, model: Any, reduction: Any) -> None:
        # Keras keeps this object as `train_function` between calls of `fit`, and with it the engine's compiled code.
        self._model = model
        self._accumulation = _Accumulation(model)
        refuse_overwritten(model.trainable_variables, "a DistributedOptimizer")
        local = reduction.local_indices(model.trainable_variables)
        self._merge = _GradientMerge(
            reduction,
            local,
            is_unfused=self._accumulation.steps > 1 or bool(local),
            checks_finite=self._accumulation.is_scaled,
        )
        self._engine = make_engine(model, self._merge)
        self._engine.metric_rules.set_variables(model.metrics_variables)  # Keras has already built the model

    def __call__(self, state: Any, iterator: Iterator[Any]) -> Any:
        from phalanx.horovod.keras.keras_optimizer import already_reduced

        model = self._model
        timeline.current.enter("data")
        data = next(iterator)
        # Between steps, the engine stores the state where Keras does.
        names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
        set_untracked(model, _jax_state=dict(zip(names, state, strict=True)), _jax_state_synced=False)
        timeline.current.enter("forward/backward")
        # The engine calls the optimizer's update in its second function, with gradients that the merge has reduced.
        with already_reduced():
            self._step(data)
            for _ in range(model.steps_per_execution - 1):
                try:
                    data = next(iterator)
                except StopIteration:
                    break
                timeline.current.enter("forward/backward")
                self._step(data)
        timeline.current.leave()
        return self._engine.logs(), tuple(model._jax_state[name] for name in names)

    def _step(self, data: Any) -> None:
        if self._accumulation.steps == 1:
            self._engine.train(data, 1.0)
            return
        with self._accumulation.take_at_update(self._model) as accumulated, self._merge.with_accumulated(accumulated):
            self._engine.train(data, 1.0)
        if self._merge.has_overflowed:
            self._accumulation.restore(self._model)


class _Accumulation:
    """The gradients that an optimizer on JAX accumulates, local to each rank, until the step that updates.

    Between two updates nothing is reduced: the optimizer gets this rank's gradients, as it would on a single rank.
    Before an update, the accumulated gradients are taken from it and reduced together with those of the step.

    Attributes:
        steps: Number of steps over which the optimizer accumulates.
        is_scaled: Whether the loss is scaled. If so, a batch whose gradients are not finite on some rank is skipped on
            all, and the gradients accumulated before it are kept.
    """

    def __init__(self, model: Any) -> None:
        from phalanx.horovod.keras.keras_optimizer import accumulation_steps_of

        outer, optimizer = model.optimizer, inner_optimizer(model.optimizer)
        accumulators = list(getattr(optimizer, "_accumulated_gradients", ()))
        # A variable without an accumulator (None) changes at every step.
        is_complete = len(accumulators) == len(model.trainable_variables)
        is_complete = is_complete and all(each is not None for each in accumulators)
        self.steps = accumulation_steps_of(optimizer) if is_complete else 1
        self.is_scaled = self.steps > 1 and outer is not optimizer
        self._taken: dict[int, Any] = {}  # by index: the accumulated values of the last step that updates
        if self.steps > 1:
            # Positions in `outer.variables`, which is the order of `optimizer_variables` in Keras's state.
            indices = {id(variable): index for index, variable in enumerate(outer.variables)}
            self._scale = indices[id(outer.dynamic_scale)] if self.is_scaled else None
            self._iterations = indices[id(optimizer._iterations)]
            self._indices = [indices[id(variable)] for variable in accumulators]

    @contextlib.contextmanager
    def take_at_update(self, model: Any) -> Iterator[list[Array] | None]:
        """At a step that updates, yield the accumulated gradients, scaled as the step's gradients; else yield None.

        Zeros replace them in the optimizer; if the step fails, they are restored.
        """
        state = model._jax_state  # Keras's state of the model between two steps
        values = list(state["optimizer_variables"])
        self._taken = {}
        # The same condition as in Keras: `_iterations` counts the earlier batches that were not skipped.
        if (int(values[self._iterations]) + 1) % self.steps:
            yield None
            return
        self._taken = taken = {index: values[index] for index in self._indices}
        for index, value in taken.items():
            values[index] = keras.ops.zeros_like(value)
        before, state["optimizer_variables"] = state["optimizer_variables"], values
        # Accumulated gradients are already unscaled; the step's gradients are not.
        scale = 1.0 if self._scale is None else float(values[self._scale])
        try:
            yield [
                np.asarray(value) if scale == 1.0 else np.multiply(value, np.float32(scale)) for value in taken.values()
            ]
        except BaseException:
            state["optimizer_variables"] = before
            raise

    def restore(self, model: Any) -> None:
        """Put the gradients back that were taken for a step that was then skipped."""
        state = model._jax_state
        values = list(state["optimizer_variables"])
        for index, value in self._taken.items():
            values[index] = value
        state["optimizer_variables"] = values


class _GradientMerge(Merge):
    """Reduces a step's gradients, and leaves everything else local to this rank.

    Args:
        reduction: An `OptimizerReduction`.
        local: Indices of gradients that are not reduced.
        is_unfused: Whether gradients must have the shapes of their variables.
        checks_finite: Whether ranks first check that all gradients are finite; if some are not, all ranks get NaN.

    Attributes:
        has_overflowed: Whether some gradients of the last step were not finite, before or after the reduction.
    """

    is_unfused = False
    once_per_step = True

    def __init__(self, reduction: Any, local: Collection[int], *, is_unfused: bool, checks_finite: bool) -> None:
        self.has_overflowed = False
        self.is_unfused = is_unfused
        self._checks_finite = checks_finite
        self._reduction = reduction
        self._local = local
        self._buffers = MergeBuffers()
        self._accumulated: list[Array] | None = []  # set inside `with_accumulated`; empty outside

    @contextlib.contextmanager
    def with_accumulated(self, accumulated: list[Array] | None) -> Iterator[None]:
        """Within the context, reduce gradients together with the accumulated ones; None for no reduction."""
        self._accumulated = accumulated
        try:
            yield
        finally:
            self._accumulated = []

    def all_reduce(self, local: Array, share: float) -> Array:
        """Return this rank's total: each rank divides its loss by its local number of samples, as in Horovod."""
        return local

    def all_gather(self, local: Array, share: float) -> tuple[Array, int]:
        return local, 0

    def __call__(self, layout: StepLayout, arrays: Sequence[Array], share: float) -> list[Array]:
        flats, views = self._buffers.next(layout)
        own, outs = [], []
        for weight, array, view in zip(layout.weights, arrays, views, strict=True):
            if weight is MergeWeight.GRADIENT:
                own.append(array)
                outs.append(view)
            else:
                np.copyto(view, array)
        if self._checks_finite and own and not self._all_finite(own):
            # On all ranks, so that the loss scaling of each skips this batch.
            for out in outs:
                out.fill(np.nan)
        elif self._accumulated is None:
            for out, gradient in zip(outs, own, strict=True):
                np.copyto(out, gradient)
        elif own:
            if self._accumulated:
                own = [one + more for one, more in zip(own, self._accumulated, strict=True)]
            for index in self._local:
                np.multiply(own[index], own[index].dtype.type(self._reduction.local_factor), out=outs[index])
            shared = [index for index in range(len(own)) if index not in self._local]
            if shared:
                gradients, results = [own[index] for index in shared], [outs[index] for index in shared]
                step_reports.report_reduction(lambda: self._reduce(gradients, results), applies_next=True)
                if self._checks_finite:
                    # Each rank's gradients were finite, but their sum or compressed form may not be. The results are
                    # equal on all ranks, so the loss scaling of all skips the batch.
                    self.has_overflowed = not _are_finite(results)
        return flats

    def _reduce(self, gradients: Sequence[Array], outs: Sequence[Array]) -> None:
        if not self._reduction.is_included:  # it trains alone
            for out, gradient in zip(outs, gradients, strict=True):
                np.multiply(gradient, gradient.dtype.type(self._reduction.factor), out=out)
            return
        reduction = self._reduction.reduction
        arguments = reduction.to_arguments(self._reduction.name, self._reduction.factor)

        def reduce(packed: Sequence[Any]) -> list[Array]:
            # Without compression, the result is written directly into `outs`.
            is_plain = all(array is gradient for array, gradient in zip(packed, gradients, strict=True))
            arrays = list(map(np.asarray, packed))
            kind, results = OperationKind.ALLREDUCE, outs if is_plain else None
            reduced: list[Array] = operations.start(kind, arrays, arguments, outs=results, wake=False).wait()
            return reduced

        for out, result in zip(outs, run_compressed(reduction.compression, gradients, reduce), strict=True):
            if result is not out:
                np.copyto(out, np.asarray(result))

    def _all_finite(self, gradients: Sequence[Array]) -> bool:
        finite = np.array([_are_finite(gradients)], np.uint8)
        reduction = self._reduction
        if reduction.is_included:
            (finite,) = operations.run(
                OperationKind.ALLREDUCE,
                [finite],
                name=reduction.finite_name,
                op=operations.Min,
                process_set=reduction.reduction.process_set,
            )
        self.has_overflowed = not finite[0]
        return not self.has_overflowed


def _are_finite(arrays: Sequence[Array]) -> bool:
    return all(np.isfinite(each).all() for each in arrays)
