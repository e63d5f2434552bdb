"""Keras models on TensorFlow.

A training step is one `tf.function`: gradients, a host call that merges them with everything else that the step
changed, and the optimizer. (Two functions with the merge between them were slower: each call from Python costs more
than the host call.) If the model asks for XLA, the parts before and after the merge are compiled with it. The host call
cannot be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines import step_logs
from phalanx.engines.accelerations import registry
from phalanx.engines.accelerations.tensorflow_fused_adam import fused_adam
from phalanx.engines.engine import Batch, Merge, ModelValues, UpdateDeferred
from phalanx.engines.replica.replica_engine import ReplicaEngine, fill_missing_gradients, variables_of_optimizers
from phalanx.engines.replica.tensorflow.batch_functions import BatchFunction, runs_eagerly
from phalanx.engines.replica.tensorflow.graph_merge import GraphMerge, HostCallInXlaError
from phalanx.engines.replica.tensorflow.host_calls import pop_failure
from phalanx.engines.replica.tensorflow.keras_traces import FunctionsByTrace, KerasTraces
from phalanx.engines.replica.tensorflow.tensorflow_tensors import TensorFlowTensors
from phalanx.engines.step_layout import MergeWeight, StepLayout, gradient_weights
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_state
from phalanx.keras_compat.global_batch.global_gradients import GlobalGradients
from phalanx.keras_compat.global_batch.global_losses import GloballyScaledLosses
from phalanx.keras_compat.global_batch.optimizer_applies import merging_applies
from phalanx.keras_compat.global_batch.step_collectives import PREDICTION, StepScope, trace_key
from phalanx.keras_compat.global_batch.step_means import WeightedStepMeans
from phalanx.keras_compat.global_batch.tensorflow_tape import SampleLossGradients
from phalanx.keras_compat.layer_building import build_all
from phalanx.keras_compat.tensorflow_trace_keys import add_trace_key

Array = np.ndarray[Any, Any]

logger = logging.getLogger(__name__)

_Logs = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Logs of a step: the means of the ranks' own logs, the results of the metrics, and logs that follow from those."""


class TensorFlowEngine(ReplicaEngine):
    """Steps of one Keras model on the TensorFlow backend; see `phalanx.engines.engine.Engine`."""

    def __init__(self, model: Any, merge: Merge) -> None:
        self._variables = TensorFlowVariables()
        super().__init__(model, merge, self._variables)
        self._state: list[Any] = []  # of the layers; set by `build`
        self._logs: _Logs = {}, {}, {}  # of the newest training step
        self._never_updated: frozenset[str] | None = None
        self._train_traces = KerasTraces(model, self._batches, merge)
        self._test_traces = KerasTraces(model, self._batches, merge)
        self._predictions: dict[ElementStructure, FunctionsByTrace] = {}
        self._graph = graph = GraphMerge(merge)
        self._losses = GloballyScaledLosses()
        self._contexts: tuple[AbstractContextManager[Any], ...] = (
            self._losses,
            WeightedStepMeans(lambda: graph.share_in_graph),
            SampleLossGradients(lambda: graph.share_in_graph, lambda: self._losses.batch_size),
            # The key: a function that the model compiles itself would otherwise keep calling another engine's merge.
            StepScope(graph.collectives, key=object()),
        )
        add_trace_key(trace_key)
        self._fused = registry.choose("tensorflow_fused_adam", fused_adam, nullcontext)
        self._make_functions(xla=bool(model.jit_compile) and not model.run_eagerly)

    def _make_functions(self, *, xla: bool) -> None:
        self._graph.xla = xla
        is_overridden = model_state.overrides(self._model, "train_step")
        step = self._train_overridden if is_overridden else self._train_own
        self._train = FunctionsByTrace(self._train_traces, step, self._function)
        self._test = FunctionsByTrace(self._test_traces, self._test_step, partial(self._function, jit_compile=xla))

    def _function(self, function: Callable[..., Any], *, jit_compile: bool = False) -> BatchFunction:
        return BatchFunction(
            function,
            eager=self._model.run_eagerly,
            jit_compile=jit_compile,
            for_each_shape=self._merge.uses_micro_batches,
        )

    @property
    def needs_batch_to_build(self) -> bool:
        return False  # it builds while it traces

    @property
    def runs_python(self) -> bool:
        return runs_eagerly(self._model)

    def retrace(self) -> None:
        self._make_functions(xla=self._graph.xla)

    def build(self, data: Batch) -> None:
        model = self._model
        parts_are_built = model_state.has_built_parts(model, with_loss=data[1] is not None)
        only_a_step = type(model).call is keras.Model.call or parts_are_built
        if model_state.overrides(model, "train_step") and only_a_step:
            # A custom `train_step` may do anything with its parts, and need not call the model.
            if not model.optimizer.built and parts_are_built:
                model.optimizer.build(model.trainable_variables)
        else:
            try:
                build_all(model, map_leaves(_without_string_arrays, self._batches.for_keras(data)))
            except Exception as error:
                if not model_state.overrides(model, "train_step"):
                    raise
                # Its step need not call the model with the batch, and may build what it uses (`build_layers_by_step`).
                logger.info("%r cannot be built from a batch, but perhaps in its step: %r", model.name, error)
        self._state = self.layer_state()
        self._set_variables()

    def train(self, data: Batch, share: float) -> None:
        if not (self._merge.repeats_steps or self._merge.uses_micro_batches):
            self._logs = self._run("_train", data, share)
            return
        changed = [*self._state, *self._metrics]
        if model_state.overrides(self._model, "train_step"):
            changed += variables_of_optimizers(self._model)
        # References, not copies: TensorFlow writes a new value elsewhere while the old one is still referenced.
        before = self._variables.copies(changed)
        try:
            logs = self._run("_train", data, share)
            if self._graph.is_deferred:
                raise UpdateDeferred
            self._logs = logs
        except BaseException:
            self._variables.write(changed, before)
            raise

    def test(self, data: Batch, share: float) -> None:
        # A placeholder batch is computed so that all ranks reach the same collectives. What it adds is undone.
        before = None if share else self._variables.copies(self._metrics)
        self._test_logs = self._run("_test", data, share)
        if before is not None:
            self._variables.write(self._metrics, before)

    def predict(self, data: Batch, structure: ElementStructure = ElementStructure.PARTS, share: float = 1.0) -> Any:
        if (functions := self._predictions.get(structure)) is None:
            model, batches = self._model, self._batches
            make = partial(self._function, jit_compile=model.jit_compile)
            traces = KerasTraces(model, batches, self._merge, structure)
            functions = FunctionsByTrace(traces, lambda data: model.predict_step(batches.pack(data, structure)), make)
            self._predictions[structure] = functions
        self._graph.begin_step(share)
        _, means, _, _ = self._contexts
        with StepScope(PREDICTION, key="predict"), means if self.predictions_update_metrics else nullcontext():
            outputs = functions(data)
        return tree.map_structure(partial(_predicted, self._model), outputs)

    def logs(self) -> Mapping[str, Any]:
        averages, results, derived = self._logs
        silent = self._never_updated or frozenset()
        return step_logs.choose_logs(averages, lambda: results, silent, self.origins, lambda: derived)

    def _custom_logs(self) -> Mapping[str, Any]:
        return self._logs[0]

    def _run(self, name: str, data: Batch, share: float) -> Any:
        """Call one of the functions. It is looked up by name, because it may be rebuilt without XLA meanwhile."""
        graph = self._graph
        self._share = share
        graph.begin_step(share)
        # In a graph, the number of samples is unknown: a value of known length is not one value per sample.
        eagerly = runs_eagerly(self._model)
        self._losses.batch_size = model_state.samples(data) if eagerly else -1
        losses, means, tapes, in_step = self._contexts
        try:
            with losses, means, tapes, in_step:
                return getattr(self, name)(data)
        except HostCallInXlaError:
            logger.info("XLA is disabled for %r: its replicas exchange values within a step.", self._model.name)
            self._make_functions(xla=False)
            return self._run(name, data, share)
        except Exception as error:
            failure = pop_failure() or TensorFlowTensors.find_cause(error)
            if failure is not None:  # the merge's own error, not what TensorFlow or Keras turned it into
                raise failure from None
            raise

    # The parts of a step, traced into one function.

    def _train_own(self, data: Batch) -> _Logs:
        model, graph = self._model, self._graph
        before = self._start_metrics()
        weights = model.trainable_weights
        gradients, logs = self._function(self._gradients, jit_compile=graph.xla).traced(data)
        if self._merge.updates_weights:
            gradients = fill_missing_gradients(gradients, weights)
        sparse = graph.gather_slices(gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None and i not in sparse]
        own = [weights[i] for i in present]
        # Everything that the step changed, in one all-reduce. Sparse gradients were gathered before it, so that a
        # failure of either leaves all variables as they were.
        merged, averages = self._merge_all(own, [gradients[i] for i in present], logs, before)
        for i, gradient in [*zip(present, merged, strict=True), *sparse.items()]:
            gradients[i] = gradient
        if self._merge.updates_weights:
            _assign_weights(gradients, weights)
        elif weights:
            # What does not depend on the gradients (step count, weight decay) must not happen if the merge fails.
            others = [slices.values for slices in sparse.values()]
            with tf.control_dependencies([*merged, *others]):
                self._apply_unless_deferred(gradients, weights)
        return averages, dict(model.get_metrics_result()), self.origins.results(averages)

    def _apply_unless_deferred(self, gradients: list[Any], weights: list[Any]) -> None:
        def apply() -> Any:
            with self._fused(self._model.optimizer):
                self._model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return tf.constant(True)

        if self._merge.uses_micro_batches:
            tf.cond(self._graph.is_deferred_in_graph, lambda: tf.constant(False), apply)
        else:
            apply()

    def _gradients(self, data: Batch) -> tuple[list[Any], dict[str, Any]]:
        # As TensorFlowTrainer.train_step, up to the optimizer. Metrics come first, to be merged with the gradients.
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._batches.for_keras(data))
        own = GlobalGradients(model.optimizer)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            model._loss_tracker.update_state(loss, sample_weight=tf.shape(leaves(x)[0])[0])
            scaled = own.scale_loss(loss)
        gradients = own.to_merge(tape.gradient(scaled, model.trainable_weights), model.trainable_weights)
        differ = model_state.logs_differ_from_metrics(model, "train_step")
        with self.origins.watched(may_differ=differ) as find:
            logs = find(model.compute_metrics(x, y, y_pred, sample_weight=sample_weight))
        return self._graph.dense(gradients, model.trainable_weights), logs if differ else {}

    def _train_overridden(self, data: Batch) -> _Logs:
        before = self._start_metrics()
        assign = _assign_weights if self._merge.updates_weights else None
        merging = merging_applies(self._model, self._graph.merge_gradients, self._fused, assign)
        with merging, self.origins.watched() as find:
            logs = find(self._model.train_step(self._batches.pack(data)))
        _, averages = self._merge_all([], [], logs, before)
        return averages, dict(self._model.get_metrics_result()), self.origins.results(averages)

    def _test_step(self, data: Batch) -> dict[str, Any]:
        """Run the model's test step and return the logs that it computes itself."""
        differ = model_state.logs_differ_from_metrics(self._model, "test_step")
        with self._test_origins.watched(may_differ=differ) as find:
            logs = find(self._model.test_step(self._batches.pack(data)))
        return logs if differ else {}

    def _start_metrics(self) -> list[Any]:
        """Reset the metrics' counters, so that they hold what this step adds. Returns their previous values."""
        before = self._variables.copies(self._metrics)
        for variable, value, rule in zip(self._metrics, before, self.metric_rules.rules, strict=True):
            if rule.is_additive:
                variable.assign(tf.zeros_like(value))
        return before

    def _merge_all(
        self, weights: Sequence[Any], gradients: list[Any], logs: dict[str, Any], before: list[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Merge gradients, state, metrics and logs in one call. Returns gradients and logs, and assigns the others.

        Args:
            weights: The weights that have a gradient here.
            gradients: The gradients of `weights`.
            logs: The logs that the step computed itself.
            before: The metrics' values before the step.
        """
        tensors = [
            *gradients,
            *[variable.value for variable in self._state],
            *[variable.value for variable in self._metrics],
            *[tf.cast(value, tf.float32) for value in logs.values()],
        ]
        ends = np.cumsum([len(gradients), len(self._state), len(self._metrics)])
        counted = [*gradient_weights(weights), *[MergeWeight.SHARE] * len(self._state)]
        of_all = [*counted, *self.metric_rules.weights, *[MergeWeight.SHARE] * len(logs)]

        def on_merged(layout: StepLayout, flats: Sequence[Array]) -> None:
            if self._never_updated is None or self._never_updated:
                counted = layout.unpack(flats)[ends[1] : ends[2]]
                self._never_updated = step_logs.metrics_never_updated(self._never_updated, self._model, counted)

        values = self._graph.merge(tensors, of_all, on_merged, weights)
        merged, state, metrics, averages = (values[a:b] for a, b in zip([0, *ends], [*ends, None], strict=True))
        for variable, value in zip(self._state, state, strict=True):
            variable.assign(value)
        for variable, value, rule, old in zip(self._metrics, metrics, self.metric_rules.rules, before, strict=True):
            variable.assign(old + value if rule.is_additive else value)
        return merged, dict(zip(logs, averages, strict=True))


class TensorFlowVariables(ModelValues):
    """See `ModelValues`."""

    def copies(self, variables: Sequence[Any]) -> list[Any]:
        """Return tensors that keep the current values."""
        return [tf.identity(variable.value) for variable in variables]

    def read(self, variables: Sequence[Any]) -> list[Array]:
        return [np.array(variable.value) for variable in variables]

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        _assign_weights(values, variables)


def _assign_weights(values: Sequence[Any], weights: Sequence[Any]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.assign(value)


def _predicted(model: Any, output: Any) -> Array:
    if isinstance(output, tf.RaggedTensor):
        raise UnsupportedError(
            f"{model.name!r} predicts ragged tensors, which are not gathered from the replicas. Pad them in the model, "
            f"with to_tensor() or ragged=False; or call the model itself, as model(x), outside of the strategy's scope."
        )
    return np.asarray(output)


def _without_string_arrays(array: Array) -> Any:
    """Convert strings for Keras, which does not support them in NumPy arrays."""
    return tf.convert_to_tensor(array) if array.dtype.kind in "OSU" else array
