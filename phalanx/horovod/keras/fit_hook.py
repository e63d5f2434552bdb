"""How Keras's own `fit` trains with a `DistributedOptimizer`: by a train function that can wait for other ranks.

- TensorFlow: Keras's train function, but without XLA, which cannot call the host.
- PyTorch: Keras's train function, as it is.
- JAX: a compiled function cannot wait for other processes. There the engine's two functions, with the merge between
  them (`phalanx.engines.replica.jax.jax_engine`), take the train function's place; the rest of `fit` is Keras's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from phalanx.engines import make_engine
from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.horovod import operations, step_reports
from phalanx.horovod.operations import Average
from phalanx.keras_compat import hook
from phalanx.keras_compat.patching import set_untracked
from phalanx.monitoring import timeline
from phalanx.training import model_dispatch
from phalanx.training.steps.gradient_merge import MergeBuffers

Array = np.ndarray[Any, Any]


def install() -> None:
    """From now on models with a DistributedOptimizer train so; safe to call again."""
    hook.choose_train_function(_train_function)


def _train_function(model: Any, make: Callable[[], None]) -> Callable[..., Any] | None:
    """The function for the steps of `fit`, where it is not the one that Keras makes (`make`)."""
    from phalanx.horovod.keras.optimizer import way_of

    way = way_of(model.optimizer)
    if way is None or model_dispatch.member_of(model) is not None:
        return None
    backend = keras.backend.backend()
    if backend == "jax":
        return _JaxFunction(model, way)
    with _without_xla(model) if backend == "tensorflow" else contextlib.nullcontext():
        make()
    return step_reports.recorded(model.train_function)


@contextlib.contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    before = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = before


class _JaxFunction:
    """In the place of Keras's train function on JAX: `(state, iterator) -> (logs, state)`."""

    def __init__(self, model: Any, way: Any) -> None:
        self._model = model
        self._accumulation = _Accumulation(model)
        own = way.locals_of(model.trainable_variables)
        self._merge = _GradientMerge(
            way, own, one_by_one=self._accumulation.steps > 1 or bool(own), agrees=self._accumulation.scaled
        )
        self._engine = make_engine(model, self._merge)

    def __call__(self, state: Any, iterator: Iterator[Any]) -> Any:
        from phalanx.horovod.keras.optimizer import merged_already

        model = self._model
        timeline.current.enter("data")
        data = next(iterator)
        # Where the engine, as Keras, keeps the state between steps.
        names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
        set_untracked(model, _jax_state=dict(zip(names, state, strict=True)), _jax_state_synced=False)
        timeline.current.enter("forward/backward")
        with merged_already():
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
        with self._accumulation.taken(self._model) as accumulated, self._merge.with_these(accumulated):
            self._engine.train(data, 1.0)
        if self._merge.overflowed:
            self._accumulation.give_back(self._model)


class _Accumulation:
    """The gradients that an optimizer on JAX accumulates, each rank its own, until the step that updates.

    Between two updates nothing is merged: the optimizer is given this rank's gradients, as without other ranks. Before
    an update they are taken from it and merged with the step's own, so that it is given all there is at once.

    Attributes:
        steps: over how many it accumulates.
        scaled: whether the loss is scaled. Then a batch whose gradients are not finite on some rank is left out on all,
            and what was accumulated before it stays.
    """

    def __init__(self, model: Any) -> None:
        from phalanx.horovod.keras.optimizer import accumulation_of, innermost

        outer, optimizer = model.optimizer, innermost(model.optimizer)
        own = list(getattr(optimizer, "_accumulated_gradients", ()))
        # Where a variable is not accumulated for (None), it is changed at every step.
        simple = len(own) == len(model.trainable_variables) and all(each is not None for each in own)
        self.steps = accumulation_of(optimizer) if simple else 1
        self.scaled = self.steps > 1 and outer is not optimizer
        self._taken: dict[int, Any] = {}
        if self.steps > 1:
            places = {id(variable): index for index, variable in enumerate(outer.variables)}
            self._scale = places[id(outer.dynamic_scale)] if self.scaled else None
            self._iterations = places[id(optimizer._iterations)]
            self._places = [places[id(variable)] for variable in own]

    @contextlib.contextmanager
    def taken(self, model: Any) -> Iterator[list[Array] | None]:
        """While inside, at a step that updates, what was accumulated is not the optimizer's any more, but what this
        yields, in the scale of the step's gradients; if the step fails it is given back. At other steps it yields None.
        """
        state = model._jax_state  # Keras's state of the model between two steps
        values = list(state["optimizer_variables"])
        self._taken = {}
        if (int(values[self._iterations]) + 1) % self.steps:
            yield None
            return
        self._taken = taken = {place: values[place] for place in self._places}
        for place, value in taken.items():
            values[place] = keras.ops.zeros_like(value)
        before, state["optimizer_variables"] = state["optimizer_variables"], values
        scale = 1.0 if self._scale is None else float(values[self._scale])
        try:
            yield [
                np.asarray(value) if scale == 1.0 else np.multiply(value, np.float32(scale)) for value in taken.values()
            ]
        except BaseException:
            state["optimizer_variables"] = before
            raise

    def give_back(self, model: Any) -> None:
        """The step was left out: what was taken for it is the optimizer's again."""
        state = model._jax_state
        values = list(state["optimizer_variables"])
        for place, value in self._taken.items():
            values[place] = value
        state["optimizer_variables"] = values


class _GradientMerge:
    """Merges a step's gradients over the ranks, and leaves all else this rank's own (`backends.engine.Merge`).

    Args:
        local: which gradients stay this rank's own, by place.
        one_by_one: gradients must come in the shapes of their variables.
        agrees: whether ranks first tell each other if their gradients are finite; if some are not, all get none.

    Attributes:
        overflowed: whether that was so at the last step.
    """

    updates = repeats = False
    exchange = gather = None

    def __init__(
        self, way: Any, local: Collection[int] = (), *, one_by_one: bool = False, agrees: bool = False
    ) -> None:
        self.overflowed = False
        self._agrees = agrees
        self._way = way
        self._local = local
        self._buffers = MergeBuffers()
        self.separate = one_by_one
        self._accumulated: list[Array] | None = []

    @contextlib.contextmanager
    def with_these(self, accumulated: list[Array] | None) -> Iterator[None]:
        """While inside, gradients are merged together with what was accumulated before them; None: not merged."""
        self._accumulated = accumulated
        try:
            yield
        finally:
            self._accumulated = []

    def total(self, own: Array, share: float) -> Array:
        """Each rank divides its loss by its own samples, as Horovod has it."""
        return own

    def __call__(self, layout: StepLayout, arrays: Sequence[Array], share: float) -> list[Array]:
        flats, views = self._buffers.next(layout)
        gradients = [index for index, weight in enumerate(layout.weights) if weight is MergeWeight.GRADIENT]
        for index, (array, view) in enumerate(zip(arrays, views, strict=True)):
            if layout.weights[index] is not MergeWeight.GRADIENT:
                np.copyto(view, array)
        own, outs = [arrays[index] for index in gradients], [views[index] for index in gradients]
        if self._agrees and gradients and not self._all_finite(own):
            for out in outs:
                out.fill(np.nan)
        elif self._accumulated is None:
            for out, gradient in zip(outs, own, strict=True):
                np.copyto(out, gradient)
        elif gradients:
            if self._accumulated:
                own = [one + more for one, more in zip(own, self._accumulated, strict=True)]
            for index in self._local:
                np.multiply(own[index], own[index].dtype.type(self._way.own_factor), out=outs[index])
            merged = [index for index in range(len(own)) if index not in self._local]
            if merged:
                step_reports.merged(
                    lambda: self._merge([own[index] for index in merged], [outs[index] for index in merged]),
                    applied=True,
                )
        return flats

    def _all_finite(self, gradients: Sequence[Array]) -> bool:
        finite = np.array([all(np.isfinite(each).all() for each in gradients)], np.uint8)
        if not self._way.process_set.included():
            self.overflowed = not finite[0]
            return bool(finite[0])
        (least,) = operations.allreduce(
            [finite], name=self._way.name_of_agreement, op=operations.Min, process_set=self._way.process_set, wake=False
        ).wait()
        self.overflowed = not least[0]
        return not self.overflowed

    def _merge(self, gradients: Sequence[Array], outs: Sequence[Array]) -> None:
        way = self._way
        if not way.process_set.included():  # it trains by itself
            for out, gradient in zip(outs, gradients, strict=True):
                np.multiply(gradient, gradient.dtype.type(way.factor), out=out)
            return
        packed = [way.compression.compress(gradient) for gradient in gradients]
        plain = all(tensor is gradient for (tensor, _), gradient in zip(packed, gradients, strict=True))
        average = way.op is Average
        merged = operations.allreduce(
            [np.asarray(tensor) for tensor, _ in packed],
            name=way.name,
            op=way.op,
            prescale_factor=1.0 / way.gradient_predivide_factor if average else 1.0,
            postscale_factor=way.factor * (way.gradient_predivide_factor if average else 1.0),
            process_set=way.process_set,
            outs=outs if plain else None,
            wake=False,
        ).wait()
        if not plain:
            for out, tensor, (_, ctx) in zip(outs, merged, packed, strict=True):
                np.copyto(out, np.asarray(way.compression.decompress(tensor, ctx)))
