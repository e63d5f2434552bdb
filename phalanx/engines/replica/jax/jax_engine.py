"""Keras models on JAX.

A training step is two compiled functions with the merge between them, because a host callback inside a compiled
function can dead-lock on a process with one core. Both come from the model's own `train_step`, overridden or
not: it is traced once with the optimizer's `stateless_apply` replaced by a probe that notes the gradients and
changes nothing. What else it returns (metric and layer state, logs) is merged along with the gradients.

    gradients(state, batch)     -> gradients, layer state, metric increments, logs     (this rank's)
    merge                       -> the same over all ranks, in flat buffers
    update(state, flat buffers) -> weights, optimizer state, metric state, logs        (everybody's)

Who owns the buffers: `update` of step k may still read them when it has returned (JAX works asynchronously and may
alias them), but the merge of step k + 1 waits for the gradients of step k + 1, which need the result of `update`
of step k. So no buffer is overwritten while it is read.

Where a merge exchanges gradients for weights there is nothing else to merge and no `update`: the weights are lent by
the merge, and `gradients` of the next step computes from them where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import tree

from phalanx.arrays.tree import map_leaves
from phalanx.data.elements import ElementStructure
from phalanx.engines import step_logs
from phalanx.engines.batch_packing import Packing
from phalanx.engines.engine import Batch, Exchange, MergeProtocol
from phalanx.engines.replica.jax.compiled_step import CompiledStep
from phalanx.engines.replica.jax.host_memory import SAME_ON_ALL, computes_on_host, pinned_memory, wide_vectors
from phalanx.engines.replica.jax.output_packing import OutputPacking
from phalanx.engines.step_layout import SMALL, SMALL_ON_THE_BUS, WEIGHT_OF_AGGREGATION, MergeWeight, StepLayout, bundles
from phalanx.engines.tensors import Gradient, HostFunction, Shape, same_shape
from phalanx.engines.updater import BackendUpdater
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_state
from phalanx.keras_compat.internals import in_stateless_scope
from phalanx.keras_compat.jax_gradient_probe import only_call, probe
from phalanx.keras_compat.log_origins import LogOrigins

Array = np.ndarray[Any, Any]
Values = list[Any]


class _Local(NamedTuple):
    """What `gradients` returns: this rank's part of a step."""

    merged: Values
    private: dict[int, Any]  # non-trainable variables that it changed and that are not merged (random seeds), by index


class _Own(NamedTuple):
    """What a step returns of which only the gradients are merged."""

    gradients: Values
    changed: dict[int, Any]  # non-trainable variables that it changed, by index
    metrics: Values
    logs: dict[str, Any]


class _Weights:
    """The newest weights, where a merge lends them. Those that are arrays of NumPy lie in memory that others will write
    again: whoever takes the weights one by one, as Keras does, gets copies of them."""

    def __init__(self, values: Values) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return (jnp.array(value) if isinstance(value, np.ndarray) else value for value in self.values)


class JaxEngine(Packing):
    """Steps of one Keras model on the JAX backend; see `phalanx.engines.engine.Engine`."""

    def __init__(self, model: Any, merge: MergeProtocol) -> None:
        self._model = model
        self._merge = merge
        self._compiled = bool(model.jit_compile) and not model.run_eagerly
        self._pinned = pinned_memory()
        self._predict = self._jit(model.predict_step)
        self._results = self._jit(partial(model_state.results_of, model))
        self.retrace()
        self.origins = LogOrigins(model)
        self._test_origins = LogOrigins(model)
        self._logs: dict[str, Any] = {}
        self._test_logs: dict[str, Any] = {}
        self._test_share = 1.0

    def retrace(self) -> None:
        self._gradients = CompiledStep(self._trace_gradients, self._jit, self._merge, leave=self._for_the_host(_Local))
        self._own_step = CompiledStep(self._trace_own_gradients, self._jit, self._merge, leave=self._for_the_host(_Own))
        self._test = CompiledStep(self._trace_test, self._jit, self._merge, donate=(2,))
        self._recipe: OutputPacking | None = None
        self._update: Callable[..., Any] | None = None
        self._silent: frozenset[str] | None = None

    @property
    def builds_from_a_batch(self) -> bool:
        return model_state.is_unbuilt(self._model)

    @property
    def merges_only_gradients(self) -> bool:
        on_host = self._compiled and computes_on_host()
        return on_host and step_logs.logs_only_sums(self._model) and not self.layer_state()

    @property
    def in_variables(self) -> bool:
        return bool(self._model._jax_state_synced)

    def build(self, data: Batch) -> None:
        self._model._symbolic_build(data_batch=self._as_given(map_leaves(_as_jax_has_it, data)))
        model_state.check_losses(self._model)
        model_state.check_layers(self._model)

    def begin(self) -> None:
        # Keras's own convention: True says that the variables hold the newest values.
        self._model._jax_state_synced = True
        self._places: dict[int, tuple[int, int]] = {}

    def end(self) -> None:
        self._model.jax_state_sync()
        self._model._jax_state = None

    def train(self, data: Batch, share: float) -> None:
        trainable, non_trainable, optimizer, metrics = self._state(with_optimizer=True)
        if exchange := self._merge.exchange:
            own = self._own_step(share, trainable, non_trainable, optimizer, metrics, data)
            if not share:  # a stand-in batch counts nowhere
                own = own._replace(metrics=metrics)
            self._finish_own(exchange, own, trainable, non_trainable, optimizer)
            return
        local = self._gradients(share, trainable, non_trainable, optimizer, metrics, data)
        recipe = self._recipe
        assert recipe is not None, "tracing the gradients has written it"
        flats = self._merge(recipe.travelling, [np.asarray(array) for array in local.merged], share)
        # To a device large arrays are sent side by side.
        merged = flats if self._pinned is None else recipe.travelling.cut(flats)
        if self._update is None or (self._silent and recipe.logs):
            before = self._silent
            self._silent = step_logs.still_silent(before, self._model, recipe.read(flats)[2])
            if self._update is None or self._silent != before:
                options = None if self._pinned is None else SAME_ON_ALL
                self._update = self._jit(self._trace_update(recipe, self._silent), (0, 1, 2), options=options)
        # Where servers make the update, what the optimizer keeps stays as it is here, and need not pass through.
        moved = [] if self._merge.updates else optimizer
        trainable, updated, metrics, state, self._logs = self._update(trainable, moved, metrics, merged)
        optimizer = optimizer if self._merge.updates else updated
        for index, value in [*zip(recipe.state, state, strict=True), *local.private.items()]:
            non_trainable[index] = value
        self._keep(trainable, non_trainable, optimizer, metrics)

    def _finish_own(
        self, exchange: Exchange, own: _Own, trainable: Values, non_trainable: Values, optimizer: Values
    ) -> None:
        """The rest of a step of which only the gradients are merged."""
        weights: Values = list(exchange([np.asarray(gradient) for gradient in own.gradients], own.metrics))
        if not self._compiled:  # what a step keeps of its arguments would be overwritten
            weights = [None if weight is None else jnp.array(weight) for weight in weights]
        trainable = [old if new is None else new for old, new in zip(trainable, weights, strict=True)]
        for index, value in own.changed.items():
            non_trainable[index] = value
        self._logs = own.logs
        self._keep(trainable, non_trainable, optimizer, own.metrics)

    def warm(self, data: Batch, share: float) -> Callable[[], None] | None:
        trainable, non_trainable, optimizer, metrics = self._state(with_optimizer=True)
        return self._gradients.prepare(share, trainable, non_trainable, optimizer, metrics, data)

    def read(self, variables: Sequence[Any]) -> list[Array]:
        lists = self._state(with_optimizer=True)
        places = [self._place(variable) for variable in variables]
        return [np.array(lists[kind][number]) for kind, number in places]

    def layer_state(self) -> list[Any]:
        return model_state.layer_state(self._model)

    def _place(self, variable: Any) -> tuple[int, int]:
        """Where a variable stands in the lists of `_state`."""
        if not self._places:
            model = self._model
            kinds = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
            self._places = {id(v): (kind, n) for kind, variables in enumerate(kinds) for n, v in enumerate(variables)}
        return self._places[id(variable)]

    def write(self, values: Sequence[tuple[Any, Array]]) -> None:
        trainable, non_trainable, optimizer, metrics = self._state(with_optimizer=True)
        lists = [list(trainable), non_trainable, list(optimizer)]
        for variable, value in values:
            kind, number = self._place(variable)
            lists[kind][number] = jnp.array(value)  # a copy: steps may donate it
        self._keep(lists[0], lists[1], lists[2], metrics)

    def logs(self) -> Mapping[str, Any]:
        return self._logs

    def results_of(self, metrics: Sequence[Array]) -> Mapping[str, Any]:
        results: Mapping[str, Any] = self._results(list(metrics))
        return results

    def test(self, data: Batch, share: float) -> None:
        trainable, non_trainable, _, metrics = self._state(with_optimizer=False)
        self._test_share = share
        start = metrics if share else [jnp.copy(value) for value in metrics]  # the function consumes its own
        new_metrics, changed, self._test_logs = self._test(share, trainable, non_trainable, start, data)
        if share:
            metrics = new_metrics
            for index, value in changed.items():
                non_trainable[index] = value
        self._keep(trainable, non_trainable, None, metrics)

    def merged_metrics(self, share: float, *, final: bool, training: bool = False) -> Mapping[str, Any]:
        trainable, non_trainable, optimizer, metrics = self._state(with_optimizer=training)
        own = self._recipe.logs if training and self._recipe is not None else ()
        logs = {name: self._logs[name] for name in own} if training else self._test_logs
        weights = self._metric_weights()
        arrays = [np.asarray(value) for value in metrics]
        arrays += step_logs.weigh_last(list(logs.values()), share if training else self._test_share, share)
        layout = StepLayout.of(arrays, [*weights, *[MergeWeight.SHARE] * len(logs)])
        values = layout.cut(self._merge(layout, arrays, share))
        merged = [jnp.array(value) for value in values[: len(metrics)]]
        averages = dict(zip(logs, values[len(metrics) :], strict=True))
        self._keep(trainable, non_trainable, optimizer, merged if final else metrics)
        silent = step_logs.silent_metrics(self._model, merged)
        origins = self.origins if training else self._test_origins
        return self._chosen(averages, merged, silent, origins)

    def predict(self, data: Batch, form: ElementStructure = ElementStructure.PARTS) -> Any:
        trainable, non_trainable, _, metrics = self._state(with_optimizer=False)
        outputs, non_trainable = self._predict((trainable, non_trainable), self._packed(data, form))
        self._keep(trainable, list(non_trainable), None, metrics)
        return tree.map_structure(np.asarray, outputs)

    # Tracing.

    def _jit(
        self,
        function: Callable[..., Any],
        donate: tuple[int, ...] = (),
        leave: Any = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        if not self._compiled:
            return function
        compiled: Callable[..., Any] = jax.jit(
            function, donate_argnums=donate, out_shardings=leave, compiler_options=options
        )
        return compiled

    def _for_the_host(self, kind: Any) -> Any:
        """Where a function leaves what it returns, of whose parts the first one goes to the host."""
        return None if self._pinned is None else kind(self._pinned, *[None] * (len(kind._fields) - 1))

    def _trace_gradients(
        self, trainable: Values, non_trainable: Values, optimizer: Values, metrics: Values, data: Batch
    ) -> _Local:
        weights = self._metric_weights()
        start = [
            jnp.zeros_like(value) if weight is MergeWeight.ONE else value
            for value, weight in zip(metrics, weights, strict=True)
        ]
        gradients, changed, new_metrics, logs = self._trace_step(trainable, non_trainable, optimizer, start, data)
        floating = {i: v for i, v in changed.items() if jnp.issubdtype(v.dtype, jnp.floating)}
        private = {i: v for i, v in changed.items() if i not in floating}
        own_logs = _own_logs(self._model, "train_step", logs)
        values = [*gradients, *floating.values(), *new_metrics, *own_logs.values()]
        counted = [*[MergeWeight.GRADIENT] * len(gradients), *[MergeWeight.SHARE] * len(floating)]
        layout = StepLayout.of(values, [*counted, *weights, *[MergeWeight.SHARE] * len(own_logs)])
        separate = self._merge.separate
        small = SMALL if self._pinned is None else SMALL_ON_THE_BUS
        groups = tuple((i,) for i in range(len(values))) if separate else tuple(map(tuple, bundles(layout, small)))
        recipe = OutputPacking(layout, groups, len(gradients), tuple(floating), weights, tuple(own_logs))
        if recipe != self._recipe:
            self._recipe, self._update = recipe, None
        return _Local(recipe.join(values), private)

    def _trace_own_gradients(
        self, trainable: Values, non_trainable: Values, optimizer: Values, metrics: Values, data: Batch
    ) -> _Own:
        own = self._trace_step(trainable, non_trainable, optimizer, metrics, data)
        return own._replace(logs=model_state.flat_logs(own.logs))

    def _trace_step(
        self, trainable: Values, non_trainable: Values, optimizer: Values, metrics: Values, data: Batch
    ) -> _Own:
        """The model's own `train_step`, without the update; the logs as it returned them."""
        with probe(self._model.optimizer) as calls, self._watched("train_step", self.origins) as find:
            logs, state = self._model.train_step((trainable, non_trainable, optimizer, metrics), self._packed(data))
            find(model_state.flat_logs(logs))
        gradients = only_call(calls, state, trainable, optimizer)
        return _Own(gradients, _changed(non_trainable, state[1]), list(state[3]), logs)

    def _trace_update(self, recipe: OutputPacking, silent: frozenset[str]) -> Callable[..., Any]:
        read = recipe.read if self._pinned is None else recipe.read_travelled

        def update(trainable: Values, optimizer: Values, metrics: Values, arrays: Values) -> Any:
            gradients, state, merged, averages = read(arrays)
            if self._merge.updates:
                trainable = gradients
            else:
                trainable, optimizer = self._model.optimizer.stateless_apply(optimizer, gradients, trainable)
            metrics = [
                old + new if weight is MergeWeight.ONE else new
                for old, new, weight in zip(metrics, merged, recipe.metrics, strict=True)
            ]
            logs = self._chosen(averages, metrics, silent, self.origins)
            return trainable, optimizer, metrics, state, logs

        return update

    def _trace_test(self, trainable: Values, non_trainable: Values, metrics: Values, data: Batch) -> Any:
        with self._watched("test_step", self._test_origins) as find:
            logs, state = self._model.test_step((trainable, non_trainable, metrics), self._packed(data))
            find(model_state.flat_logs(logs))
        _, new_non_trainable, new_metrics = state
        return new_metrics, _changed(non_trainable, new_non_trainable), _own_logs(self._model, "test_step", logs)

    def _metric_weights(self) -> tuple[MergeWeight, ...]:
        return tuple(WEIGHT_OF_AGGREGATION[v.aggregation] for v in self._model.metrics_variables)

    def _watched(self, step: str, origins: LogOrigins) -> AbstractContextManager[Callable[[Mapping[str, Any]], None]]:
        return origins.watched(of_interest=model_state.logs_differ_from_metrics(self._model, step))

    def _chosen(
        self, averages: Mapping[str, Any], metrics: Values, silent: frozenset[str], origins: LogOrigins
    ) -> dict[str, Any]:
        """The logs of a step, of these values of the metrics."""
        mapping = list(zip(self._model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return step_logs.choose_logs(averages, self._model.get_metrics_result, silent, origins.results)

    # State between steps. It travels as arguments; the model's variables are empty meanwhile, as in Keras's own loop.

    def _state(self, *, with_optimizer: bool) -> tuple[Values, Values, Any, Values]:
        model = self._model
        kept = getattr(model, "_jax_state", None)
        if model._jax_state_synced or not kept:
            values = model._get_jax_state(
                trainable_variables=True,
                non_trainable_variables=True,
                optimizer_variables=with_optimizer,
                metrics_variables=True,
                purge_model_variables=True,
            )
            optimizer = values[2] if with_optimizer else None
            self._keep(values[0], values[1], optimizer, values[-1])
            return values[0], list(values[1]), optimizer, values[-1]
        trainable = kept["trainable_variables"]
        return (
            trainable.values if isinstance(trainable, _Weights) else trainable,  # Keras's own list
            list(kept["non_trainable_variables"]),
            kept.get("optimizer_variables"),
            kept["metrics_variables"],
        )

    def _keep(self, trainable: Values, non_trainable: Values, optimizer: Any, metrics: Values) -> None:
        # Keras writes this back into the variables when a callback touches `self.model`.
        state = {
            "trainable_variables": _Weights(trainable),
            "non_trainable_variables": non_trainable,
            "metrics_variables": metrics,
        }
        if optimizer is not None:
            state["optimizer_variables"] = optimizer
        # Past Keras's attribute tracking, which would copy every list.
        vars(self._model).update(_jax_state=state, _jax_state_synced=False)


def _changed(before: Values, after: Values) -> dict[int, Any]:
    """The values that are others now, by index."""
    return {index: new for index, (old, new) in enumerate(zip(before, after, strict=True)) if new is not old}


def _as_jax_has_it(array: Array) -> Array:
    """In the dtype that JAX would make of it, of which it else warns where only shapes are asked for."""
    if array.dtype.kind not in "iufc":
        return array
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if dtype == array.dtype else np.broadcast_to(np.zeros((), dtype), array.shape)


def _own_logs(model: Any, step: str, logs: Any) -> dict[str, Any]:
    """The logs that an overridden step returned; Keras's own steps return metric results, which follow anyhow."""
    if not model_state.logs_differ_from_metrics(model, step):
        return {}
    return {name: jnp.asarray(value, "float32") for name, value in model_state.flat_logs(logs).items()}


class JaxUpdater(BackendUpdater):
    """See `phalanx.engines.updater.Updater`."""

    lends = True

    def _prepare(self) -> None:
        self._values: Values = [variable.value for variable in self.variables]
        self._state: Values = [variable.value for variable in self.optimizer.variables]
        # Values that somebody still looks at JAX does not overwrite, but copies.
        self._step = jax.jit(self._trace_step, donate_argnums=(0, 2), compiler_options=wide_vectors())

    def _trace_step(self, state: Values, parts: Sequence[Values], values: Values) -> tuple[Values, Values]:
        gradients = parts[0]
        for others in parts[1:]:
            gradients = [gradient + other for gradient, other in zip(gradients, others, strict=True)]
        # The state comes first: JAX gives a donated buffer to the first result of its shape, and XLA copies what would
        # be written over before it is read. With the weights first that were all moments, a third of Adam's time.
        values, state = self.optimizer.stateless_apply(state, gradients, values)
        return state, values

    def apply(self, gradients: Sequence[Any]) -> None:
        self.apply_sum([gradients])

    def apply_sum(self, parts: Sequence[Sequence[Any]]) -> None:
        self._state, self._values = self._step(self._state, [list(part) for part in parts], self._values)

    def values(self) -> list[Any]:
        return [np.asarray(value) for value in self._values]

    def load(self, values: Mapping[int, Any], state: Mapping[int, Any]) -> None:
        # Copies: what JAX is given it may keep and reuse.
        self._values, self._state = list(self._values), list(self._state)
        for number, value in values.items():
            self._values[number] = jnp.array(value, self._values[number].dtype)
        for number, value in state.items():
            self._state[number] = jnp.array(value, self._state[number].dtype)

    def fetch(self, values: Sequence[int], state: Sequence[int]) -> tuple[list[Any], list[Any]]:
        return [np.asarray(self._values[n]) for n in values], [np.asarray(self._state[n]) for n in state]

    def set_learning_rate(self, rate: float) -> None:
        variable = self.optimizer._learning_rate
        for index, own in enumerate(self.optimizer.variables):
            if own is variable:
                self._state[index] = jnp.array(rate, own.dtype)


class JaxTensors:
    """See `phalanx.engines.tensors.Tensors`."""

    @property
    def merges_in_apply(self) -> bool:
        # `stateless_apply` runs inside compiled functions, which cannot wait for others: who calls it has merged.
        return not in_stateless_scope()

    def from_host(self, array: Any) -> Any:
        return jnp.array(array, copy=True)

    def call(
        self,
        function: HostFunction,
        tensors: Sequence[Any],
        *,
        shape_of: Callable[[Shape], Shape] = same_shape,
        gradient: Gradient | None = None,
    ) -> list[Any]:
        if any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
            raise UnsupportedError(
                "A value was merged over the replicas inside a function compiled by JAX. A compiled function cannot "
                "wait for other processes: compute the gradients in one jitted function, merge them with "
                "`strategy.reduce` or `get_replica_context().all_reduce` outside, and apply them in a second "
                "(examples/custom_loop_jax.py)."
            )
        return [self.from_host(array) for array in function([np.asarray(tensor) for tensor in tensors])]

    @staticmethod
    def failure_behind(error: BaseException) -> BaseException | None:
        return None  # errors come as they are

    @staticmethod
    def trace_apart(key: Callable[[], Hashable | None]) -> None:
        pass  # compiled functions merge nothing

    def reduce(self, thing: Any) -> Any:
        return NotImplemented
