"""The functions of a step on JAX, traced from the model's own `train_step` and `test_step`.

`train_step`, overridden or not, is traced with the optimizer's `stateless_apply` replaced by a probe that records the
gradients and changes nothing. Everything else that it returns (metric and layer state, logs) is merged with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras
from keras import tree

from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines import step_logs
from phalanx.engines.batch_packing import BatchPacking
from phalanx.engines.engine import Batch, Merge
from phalanx.engines.merge_collectives import MergeCollectives
from phalanx.engines.metric_rules import MetricRules
from phalanx.engines.replica.hyperparameters import Hyperparameters
from phalanx.engines.replica.jax.compiled_step import kind_of_trace
from phalanx.engines.replica.jax.model_compiler import ModelCompiler
from phalanx.engines.replica.jax.output_packing import OutputPacking
from phalanx.engines.step_layout import (
    SMALL,
    SMALL_ON_GPU,
    MergeWeight,
    StepLayout,
    gradient_weights,
    group_small_arrays,
)
from phalanx.keras_compat import model_state
from phalanx.keras_compat.global_batch import step_collectives
from phalanx.keras_compat.observation.jax_gradient_probe import (
    check_updates,
    gradients_of_only_call,
    merging_stateless_applies,
    recorded_applies,
)
from phalanx.keras_compat.observation.log_origins import FindOrigins, LogOrigins

Values = list[Any]


class LocalResults(NamedTuple):
    """This rank's part of a step: the packed arrays to merge, and the values that stay on this rank.

    Attributes:
        merged: The arrays that are sent.
        private: Other non-trainable variables that the step changed (random seeds), by index.
    """

    merged: Values
    private: dict[int, Any]


class AppliedResults(NamedTuple):
    """The results of a step that has applied its optimizers to merged gradients.

    Attributes:
        merged, private: See `LocalResults`.
        trainable, optimizer: The new values.
    """

    merged: Values
    private: dict[int, Any]
    trainable: Values
    optimizer: Values


class TraceResults(NamedTuple):
    """The results of a trace of `train_step`, without the update.

    Attributes:
        gradients: Gradients of all trainable variables; empty if the step has applied its optimizers.
        changed: Non-trainable variables that the step changed, by index.
        metrics: New values of the metrics' variables.
        logs: The logs as `train_step` returned them.
    """

    gradients: Values
    changed: dict[int, Any]
    metrics: Values
    logs: Any


class StepFunctions:
    """Functions for JAX to compile. Each is traced when it is first called with arguments of new shapes.

    Args:
        hyperparameters: The hyperparameters that training steps are compiled with. Without compilation, each step uses
            the current ones.
    """

    def __init__(
        self,
        model: Any,
        merge: Merge,
        compiler: ModelCompiler,
        batches: BatchPacking,
        rules: MetricRules,
        origins: tuple[LogOrigins, LogOrigins],
        hyperparameters: Hyperparameters,
    ) -> None:
        self._model = model
        self._rules = rules
        self._merge = merge
        self._compiler = compiler
        self._batches = batches
        # By kind of trace: a custom step may log or change more for one kind of batch than for another.
        self._packings: dict[Hashable, OutputPacking] = {}
        # Equal packings are one object, which is kept: the engine finds its update by identity.
        self._unique_packings: dict[OutputPacking, OutputPacking] = {}
        self._only_packing: OutputPacking | None = None  # usually, all of them are this one
        self._origins, self._test_origins = origins  # of the logs of training and of test steps
        self.hyperparameters = hyperparameters
        self._hyperparameters_applied = hyperparameters.applied if compiler.compiles else nullcontext

    def find_packing(self, *arguments: Any) -> OutputPacking:
        """Return how the first half of a step packs its results. It must have been traced for such arguments."""
        return self._only_packing or self._packings[kind_of_trace(arguments)]

    def compute_gradients(
        self, trainable: Values, non_trainable: Values, optimizer: Values, metrics: Values, data: Batch
    ) -> LocalResults:
        """Compute the first half of a step: everything up to the merge."""
        own = self._train_step(trainable, non_trainable, optimizer, self._zero_counters(metrics), data)
        return self._pack(own, kind_of_trace((trainable, non_trainable, optimizer, metrics, data)))

    def compute_and_apply(
        self, trainable: Values, non_trainable: Values, optimizer: Values, metrics: Values, data: Batch
    ) -> AppliedResults:
        """Compute a step that merges its gradients in the middle, and so also updates the weights."""
        collectives = step_collectives.current()
        assert isinstance(collectives, MergeCollectives), "a CompiledStep runs it"
        merging = merging_stateless_applies(self._model, collectives.merge_gradients)
        with self._hyperparameters_applied(), merging as applied, self._watched("train_step", self._origins) as find:
            state = (trainable, non_trainable, optimizer, self._zero_counters(metrics))
            logs, new_state = self._model.train_step(state, self._batches.pack(data))
            logs = find(logs)
        # In a compiled step, this happens during tracing, before anything is computed.
        check_updates([*trainable, *optimizer], [*new_state[0], *new_state[2]], applied)
        # Variables of another optimizer may be among the model's. They are the same on all ranks.
        identical_ids = {id(value) for value in applied}
        results = TraceResults([], _changed(non_trainable, new_state[1]), list(new_state[3]), logs)
        kind = kind_of_trace((trainable, non_trainable, optimizer, metrics, data))
        packed = self._pack(results, kind, identical_ids)
        return AppliedResults(*packed, list(new_state[0]), list(new_state[2]))

    def _zero_counters(self, metrics: Values) -> Values:
        """Start counters at zero, so that the merged values are what the step adds to them."""
        rules = self._rules.rules
        return [
            jnp.zeros_like(value) if rule.is_additive else value for value, rule in zip(metrics, rules, strict=True)
        ]

    def _pack(self, own: TraceResults, kind: Hashable, identical_ids: Collection[int] = ()) -> LocalResults:
        """Pack the values to merge.

        Args:
            own: Results of a step.
            kind: The step's kind of trace.
            identical_ids: Ids of the values that are the same on all ranks.
        """
        gradients, changed, new_metrics, logs = own
        floating = {
            i: v for i, v in changed.items() if jnp.issubdtype(v.dtype, jnp.floating) and id(v) not in identical_ids
        }
        private = {i: v for i, v in changed.items() if i not in floating}
        own_logs = self._custom_logs("train_step", logs)
        values = [*gradients, *floating.values(), *new_metrics, *own_logs.values()]
        variables = self._model.trainable_variables[: len(gradients)]
        counted = [*gradient_weights(variables), *[MergeWeight.SHARE] * len(floating)]
        of_all = [*counted, *self._rules.weights, *[MergeWeight.SHARE] * len(own_logs)]
        layout = StepLayout.of(values, of_all, variables)
        small = SMALL if self._compiler.pinned is None else SMALL_ON_GPU
        groups = [[i] for i in range(len(values))] if self._merge.is_unfused else group_small_arrays(layout, small)
        packing = OutputPacking(
            layout, tuple(map(tuple, groups)), len(gradients), tuple(floating), self._rules.rules, tuple(own_logs)
        )
        packing = self._packings[kind] = self._unique_packings.setdefault(packing, packing)
        self._only_packing = packing if len(self._unique_packings) == 1 else None
        return LocalResults(packing.join(values), private)

    def compile_update(self, packing: OutputPacking, silent: frozenset[str]) -> Callable[..., Any]:
        """Compile the second half of a step: everything after the merge.

        Args:
            packing: The packing of the first half.
            silent: Names of the metrics that no step has updated so far.
        """
        read = packing.read if self._compiler.pinned is None else packing.read_packed
        # A custom step without gradients has applied its optimizers. Keras's own step on JAX also applies the optimizer
        # if no weight is trained: loss scaling counts it.
        applies = packing.gradients or not model_state.overrides(self._model, "train_step")

        def update(trainable: Values, optimizer: Values, metrics: Values, arrays: Values) -> Any:
            gradients, state, merged, averages = read(arrays)
            # Servers have updated the weights: they return these instead of gradients.
            if self._merge.updates_weights:
                trainable = gradients
            elif applies:
                with self._hyperparameters_applied():
                    trainable, optimizer = self._model.optimizer.stateless_apply(optimizer, gradients, trainable)
            # The start counts once, on every rank. The merged values are what all batches have added.
            metrics = [
                old + new if rule.is_additive else new
                for old, new, rule in zip(metrics, merged, packing.metrics, strict=True)
            ]
            logs = self.choose_logs(averages, metrics, silent, self._origins)
            return trainable, optimizer, metrics, state, logs

        return self._compiler.jit(update, (0, 1, 2), options=self._compiler.deterministic_options)

    def test(self, trainable: Values, non_trainable: Values, metrics: Values, data: Batch) -> Any:
        """Take a test step. Returns the metrics' new values, the non-trainable variables it changed, and its logs."""
        with self._watched("test_step", self._test_origins) as find:
            logs, state = self._model.test_step((trainable, non_trainable, metrics), self._batches.pack(data))
            logs = find(logs)
        _, new_non_trainable, new_metrics = state
        return new_metrics, _changed(non_trainable, new_non_trainable), self._custom_logs("test_step", logs)

    def choose_logs(
        self, averages: Mapping[str, Any], metrics: Values, silent: frozenset[str], origins: LogOrigins
    ) -> dict[str, Any]:
        """Return a step's logs for these values of the metrics' variables; see `step_logs.choose_logs`."""
        mapping = list(zip(self._model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return step_logs.choose_logs(averages, self._model.get_metrics_result, silent, origins)

    def _train_step(
        self, trainable: Values, non_trainable: Values, optimizer: Values, metrics: Values, data: Batch
    ) -> TraceResults:
        """Run the model's own `train_step`, without the update."""
        is_custom = model_state.overrides(self._model, "train_step")
        probed = recorded_applies(self._model.optimizer, is_custom=is_custom)
        with self._hyperparameters_applied(), probed as calls, self._watched("train_step", self._origins) as find:
            state = (trainable, non_trainable, optimizer, metrics)
            logs, new_state = self._model.train_step(state, self._batches.pack(data))
            logs = find(logs)
        gradients = gradients_of_only_call(calls, new_state, trainable, optimizer)
        return TraceResults(gradients, _changed(non_trainable, new_state[1]), list(new_state[3]), logs)

    def _watched(self, step: str, origins: LogOrigins) -> AbstractContextManager[FindOrigins]:
        return origins.watched(may_differ=model_state.logs_differ_from_metrics(self._model, step))

    def _custom_logs(self, step: str, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return an overridden step's logs. Keras's steps log metric results, which follow from the merged state."""
        if not model_state.logs_differ_from_metrics(self._model, step):
            return {}
        return {name: jnp.asarray(value, "float32") for name, value in logs.items()}


class CompiledUpdate:
    """The compiled second half of a step. It depends on how the first half packs its results, on which metrics the
    steps have updated so far, and on the hyperparameters of the first half.

    Args:
        model: A compiled model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._never_updated: frozenset[str] | None = None
        self._compiled: dict[Hashable, Callable[..., Any]] = {}  # by packing and hyperparameters
        # By id of the packing (its `StepFunctions` keep it alive): one dictionary lookup per step.
        self._chosen: dict[int, Callable[..., Any]] = {}

    def choose(self, functions: StepFunctions, packing: OutputPacking, flats: Sequence[Any]) -> Callable[..., Any]:
        """Return the function for a step with merged buffers `flats`, whose first half `functions` computed."""
        if self._never_updated is None or (self._never_updated and packing.logs):
            before, merged = self._never_updated, packing.read(flats)[2]
            self._never_updated = step_logs.metrics_never_updated(before, self._model, merged)
            if self._never_updated != before:
                self._compiled.clear()
                self._chosen.clear()
        return self._chosen.get(id(packing)) or self._compile(functions, packing)

    def _compile(self, functions: StepFunctions, packing: OutputPacking) -> Callable[..., Any]:
        assert self._never_updated is not None, "choose has set it"
        key = packing, functions.hyperparameters.key
        function = self._compiled.get(key)
        if function is None:
            function = self._compiled[key] = functions.compile_update(packing, self._never_updated)
        self._chosen[id(packing)] = function
        return function


def batch_kind(data: Batch, structure: ElementStructure, global_size: int | None, variables: int) -> Hashable:
    """Return a key. Keras would compile its step again when it changes. It is the same on all ranks, which may pad a
    batch differently.

    Args:
        data: The local batch.
        structure: The structure in which Keras receives it.
        global_size: Number of samples in the global batch; None: those in `data`.
        variables: Number of arrays that are sent with it.
    """
    dtypes = [leaf if leaf is None else leaf.dtype for leaf in tree.flatten(data)]
    return structure, global_size or model_state.samples(data), variables, *dtypes


def _changed(before: Values, after: Values) -> dict[int, Any]:
    """Return the values that a step replaced, by index."""
    return {index: new for index, (old, new) in enumerate(zip(before, after, strict=True)) if new is not old}
