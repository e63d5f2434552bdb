"""Keras models on TensorFlow.

A training step is one `tf.function`: gradients, a host call that merges them with everything else that the step
changed, and the optimizer. (Two functions with the merge between them were slower: each call from Python costs more
than the host call.) The part before the merge and the part after it are compiled with XLA where the model asks for
it; the host call cannot be.

A model that overrides `train_step` calls the optimizer itself; there the gradients are merged inside
`optimizer.apply`, and the rest afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.data.elements import ElementStructure
from phalanx.engines import step_logs
from phalanx.engines.accelerations.tensorflow_fused_adam import fused
from phalanx.engines.batch_packing import Packing
from phalanx.engines.engine import Batch, GradientRows, MergeProtocol
from phalanx.engines.loss_scales import loss_scales
from phalanx.engines.replica.tensorflow.concrete_calls import ConcreteCall
from phalanx.engines.replica.tensorflow.host_calls import call_in_graph, linear
from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.engines.tensors import Gradient, HostFunction, Shape, same_shape
from phalanx.engines.updater import BackendUpdater
from phalanx.errors import UnsupportedError
from phalanx.keras_compat import model_state
from phalanx.keras_compat.global_batch_norm import SynchronizedMoments, trace_key
from phalanx.keras_compat.global_losses import GloballyScaledLosses
from phalanx.keras_compat.log_origins import LogOrigins
from phalanx.keras_compat.optimizer_applies import merging_applies
from phalanx.keras_compat.step_means import WeightedStepMeans
from phalanx.keras_compat.tensorflow_tape import SampleLossGradients
from phalanx.keras_compat.tensorflow_trace_cache import trace_apart

Array = np.ndarray[Any, Any]


logger = logging.getLogger(__name__)


_Logs = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Of a step: the mean of what the ranks logged themselves, results of the metrics, and what else follows from these."""


class _HostCallNeeded(Exception):
    """A loss or a layer asks the other ranks in the middle of what XLA compiles, which cannot call the host."""


class TensorFlowEngine(Packing):
    """Steps of one Keras model on the TensorFlow backend; see `phalanx.engines.engine.Engine`."""

    def __init__(self, model: Any, merge: MergeProtocol) -> None:
        self._model = model
        self._merge = merge
        self._share = 1.0
        self._failure: BaseException | None = None
        self._silent: frozenset[str] | None = None
        self._averages: dict[str, Any] = {}
        self._results: dict[str, Any] = {}
        self._derived: dict[str, Any] = {}
        self._test_logs: dict[str, Any] = {}
        self.origins = LogOrigins(model)
        self._test_origins = LogOrigins(model)
        self._losses = GloballyScaledLosses(self._scale_of)
        self._gradients_of_vectors = SampleLossGradients(lambda: self._share_in_graph, lambda: self._losses.batch_size)
        self._share_in_graph = tf.Variable(self._share)
        self._means = WeightedStepMeans(lambda: self._share_in_graph)
        # Functions that a model compiles itself would go on asking another engine, or nobody.
        self._moments = SynchronizedMoments(self._sum_over_ranks, key=object())
        trace_apart(trace_key)
        self._predict = self._function(model.predict_step, jit_compile=model.jit_compile)
        self._make_functions(xla=bool(model.jit_compile) and not model.run_eagerly)

    def _make_functions(self, *, xla: bool) -> None:
        self._xla = xla
        self._traces: dict[str, tuple[Any, ConcreteCall]] = {}
        own = not model_state.overrides(self._model, "train_step")
        self._train = self._function(self._train_own if own else self._train_overridden)
        self._compiled_part = self._function(self._gradients, jit_compile=xla)
        self._test = self._function(self._test_step, jit_compile=xla)

    @property
    def builds_from_a_batch(self) -> bool:
        return False  # it builds while it traces

    merges_only_gradients = False  # not built: what Keras computes takes most of a step here

    @property
    def in_variables(self) -> bool:
        return True

    def build(self, data: Batch) -> None:
        model = self._model
        only_a_step = type(model).call is keras.Model.call or model_state.has_built_parts(model)
        if model_state.overrides(model, "train_step") and only_a_step:
            # Its `train_step` may do anything with its parts, and need not call the model.
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
        else:
            model._symbolic_build(data_batch=map_leaves(_described, self._as_given(data)))
        model_state.check_losses(self._model)
        model_state.check_layers(self._model)
        self._state = model_state.layer_state(self._model)
        self._metrics = list(self._model.metrics_variables)
        self._weights = step_logs.metric_weights(self._model)

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def train(self, data: Batch, share: float) -> None:
        if not self._merge.repeats:
            self._averages, self._results, self._derived = self._run("_train", data, share)
            return
        # References: TensorFlow writes a variable's new value elsewhere as long as somebody has the old one.
        before = [(variable, tf.identity(variable.value)) for variable in self._changed_before_a_merge()]
        try:
            self._averages, self._results, self._derived = self._run("_train", data, share)
        except BaseException:
            for variable, value in before:
                variable.assign(value)
            raise

    def _changed_before_a_merge(self) -> list[Any]:
        """The variables that a step may have changed when it fails."""
        variables = [*self._state, *self._metrics]
        if model_state.overrides(self._model, "train_step"):
            # The gradients are merged and applied, and then the rest is merged.
            variables += self._model.trainable_variables
            variables += [v for optimizer in model_state.optimizers(self._model) for v in optimizer.variables]
        return variables

    def warm(self, data: Batch, share: float) -> Callable[[], None] | None:
        return None  # its functions take batches of any size

    def results_of(self, metrics: Sequence[Array]) -> Mapping[str, Any]:
        return model_state.results_of(self._model, metrics)

    def logs(self) -> Mapping[str, Any]:
        silent = self._silent or frozenset()
        return step_logs.choose_logs(self._averages, lambda: self._results, silent, lambda: self._derived)

    def _run(self, function: str, data: Batch, share: float) -> Any:
        if share != self._share:
            self._share = share
            self._share_in_graph.assign(share)
        self._failure = None
        # In a graph the number of samples is unknown: what has a length has no samples.
        eagerly = self._model.run_eagerly or tf.config.functions_run_eagerly()
        self._losses.batch_size = model_state.samples(data) if eagerly else -1
        try:
            with self._losses, self._means, self._gradients_of_vectors, self._moments:
                return self._call(function, data)
        except _HostCallNeeded:
            logger.info("XLA is off for %r: its replicas meet in the middle of a step.", self._model.name)
            self._make_functions(xla=False)
            return self._run(function, data, share)
        except Exception:
            if self._failure is not None:  # the merge's own error, not what TensorFlow or Keras made of it
                failure, self._failure = self._failure, None
                raise failure from None
            raise

    def _call(self, name: str, data: Batch) -> Any:
        """Call a function of batches; that this one is like the last, TensorFlow takes 0.1 ms to find out."""
        function, tensors = getattr(self, name), _tensors(data)
        if tf.config.functions_run_eagerly() or not isinstance(function, tf.types.experimental.PolymorphicFunction):
            return function(tensors)
        kind = _kind(data)
        last, trace = self._traces.get(name, (None, None))
        if trace is not None and last == kind:
            return trace(tensors)
        results = function(tensors)
        self._traces[name] = kind, ConcreteCall(function.get_concrete_function(tensors), tensors)
        return results

    # Parts of a step, traced into one function.

    def _train_own(self, data: Batch) -> _Logs:
        model = self._model
        before = self._start_metrics()
        gradients, logs = self._compiled_part(data)
        weights = model.trainable_weights
        if self._merge.updates:
            gradients = _complete(gradients, weights)
        sparse = self._gather_slices(gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None and i not in sparse]
        merged, averages = self._merge_all([gradients[i] for i in present], logs, before)
        for i, gradient in [*zip(present, merged, strict=True), *sparse.items()]:
            gradients[i] = gradient
        if self._merge.updates:
            _assign(gradients, weights)
        elif weights:
            # What does not depend on the gradients (the step count, weight decay) must not happen if the merge fails.
            others = [slices.values for slices in sparse.values()]
            with tf.control_dependencies([*merged, *others]), fused(model.optimizer):
                model.optimizer.apply(gradients, weights)
        return averages, dict(model.get_metrics_result()), self.origins.results()

    def _gradients(self, data: Batch) -> tuple[list[Any], dict[str, Any]]:
        # As TensorFlowTrainer.train_step, up to the optimizer; with the metrics before it, so that they travel along.
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._as_given(data))
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            model._loss_tracker.update_state(loss, sample_weight=_batch_size(x))
            scaled = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_weights)
        differ = model_state.logs_differ_from_metrics(model, "train_step")
        with self.origins.watched(of_interest=differ) as find:
            logs = model_state.flat_logs(model.compute_metrics(x, y, y_pred, sample_weight=sample_weight))
            find(logs)
        return self._dense(gradients, model.trainable_weights), logs if differ else {}

    def _train_overridden(self, data: Batch) -> _Logs:
        before = self._start_metrics()
        assign = _assign if self._merge.updates else None
        merging = merging_applies(self._model, self._merge_gradients, fused, assign)
        with merging, self.origins.watched() as find:
            logs = model_state.flat_logs(self._model.train_step(self._packed(data)))
            find(logs)
        _, averages = self._merge_all([], logs, before)
        return averages, dict(self._model.get_metrics_result()), self.origins.results()

    def _test_step(self, data: Batch) -> dict[str, Any]:
        """What it logs itself."""
        differ = model_state.logs_differ_from_metrics(self._model, "test_step")
        with self._test_origins.watched(of_interest=differ) as find:
            logs = model_state.flat_logs(self._model.test_step(self._packed(data)))
            find(logs)
        return logs if differ else {}

    def _scale_of(self, denominator: Any) -> Any:
        """The scale of one loss, by a host call inside the graph."""
        if self._xla:
            raise _HostCallNeeded
        is_sum = denominator is None

        def scale(own: Sequence[Array]) -> list[np.float32]:
            return [np.float32(loss_scales([None if is_sum else own[0]], self._merge, self._share)[0])]

        (value,) = self._on_host(scale, [tf.ones([]) if is_sum else denominator], [tf.float32])
        value.set_shape([])
        return value

    def _sum_over_ranks(self, tensors: list[Any]) -> list[Any]:
        """Sums that count a rank's samples, by a host call inside the graph.

        A rank's gradients count with its share of the global batch. So they go back weighted by the shares, too:

            own = (sum over r of share_r * gradient_r) / share

        and gradients of those (gradient penalties have them) as the sums themselves.
        """
        if self._xla:
            raise _HostCallNeeded

        def total(arrays: Sequence[Array]) -> list[Array]:
            return [self._merge.total(arrays[0], self._share)]

        def total_of_gradients(arrays: Sequence[Array]) -> list[Array]:
            share = arrays[0].dtype.type(self._share)
            everyone = self._merge.total(arrays[0] * share, self._share)
            return [everyone / share if share else np.zeros_like(everyone)]

        def on_host(function: Callable[[Sequence[Array]], list[Array]], tensor: Any) -> Any:
            (result,) = self._on_host(function, [tensor], [tensor.dtype])
            result.set_shape(tensor.shape)
            return result

        summed = linear(partial(on_host, total), partial(on_host, total_of_gradients))
        whole = summed(tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0))
        parts = tf.split(whole, [tensor.shape.num_elements() for tensor in tensors])
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _start_metrics(self) -> list[Any]:
        """Begin the step's increments at zero; returns what the metrics held before."""
        before = [tf.identity(variable.value) for variable in self._metrics]
        for variable, value, weight in zip(self._metrics, before, self._weights, strict=True):
            if weight is MergeWeight.ONE:
                variable.assign(tf.zeros_like(value))
        return before

    def _merge_gradients(self, gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        if self._merge.updates:
            gradients = _complete(gradients, weights)
        merged = self._dense(gradients, weights)
        sparse = self._gather_slices(merged)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None and i not in sparse]
        tensors = [merged[i] for i in present]
        values = self._host_merge(tensors, [MergeWeight.GRADIENT] * len(present))
        for i, value in [*zip(present, values, strict=True), *sparse.items()]:
            merged[i] = value
        return merged

    def _dense(self, gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        """The gradients as tensors of the weights' shapes, which TensorFlow does not always know (recurrent layers);
        those of single rows as they are, where these are merged."""
        dense = list(gradients)
        for i, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if gradient is not None and not (self._merge.gather and isinstance(gradient, tf.IndexedSlices)):
                dense[i] = tf.convert_to_tensor(gradient)
                dense[i].set_shape(weight.shape)
        return dense

    def _gather_slices(self, gradients: Sequence[Any]) -> dict[int, Any]:
        """The gradients of single rows, by number, merged. Keras's optimizers treat a row that occurs twice otherwise
        than one that occurs once with the sum: what plain Keras has apart must stay apart, and what it has summed over
        the whole batch must be summed over the ranks."""
        gather_rows = self._merge.gather
        slices = {i: g for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}
        if gather_rows is None or not slices:
            return {}
        tensors = [part for one in slices.values() for part in (one.indices, one.values)]
        of_any_batch = [_is_of_any_batch(one.indices) for one in slices.values()]

        def gather(arrays: Sequence[Array]) -> list[Array]:
            own = [GradientRows(*each) for each in zip(arrays[::2], arrays[1::2], of_any_batch, strict=True)]
            merged = gather_rows(own, self._share)
            return [part for rows in merged for part in (rows.numbers, rows.gradients)]

        gathered = self._on_host(gather, tensors, [tensor.dtype for tensor in tensors])
        merged = {}
        for (i, own), indices, values in zip(slices.items(), gathered[::2], gathered[1::2], strict=True):
            indices.set_shape([None])
            values.set_shape([None, *own.values.shape[1:]])
            merged[i] = tf.IndexedSlices(values, indices, own.dense_shape)
        return merged

    def _merge_all(
        self, gradients: list[Any], logs: dict[str, Any], before: list[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Merge gradients, state, metrics and logs at once; the second and third are put in their place."""
        tensors = [
            *gradients,
            *[variable.value for variable in self._state],
            *[variable.value for variable in self._metrics],
            *[tf.cast(value, tf.float32) for value in logs.values()],
        ]
        share = [*[MergeWeight.GRADIENT] * len(gradients), *[MergeWeight.SHARE] * len(self._state)]
        values = self._host_merge(
            tensors, [*share, *self._weights, *[MergeWeight.SHARE] * len(logs)], metrics_at=len(share)
        )
        ends = np.cumsum([len(gradients), len(self._state), len(self._metrics)])
        merged, state, metrics, averages = (values[a:b] for a, b in zip([0, *ends], [*ends, None], strict=True))
        for variable, value in zip(self._state, state, strict=True):
            variable.assign(value)
        for variable, value, weight, old in zip(self._metrics, metrics, self._weights, before, strict=True):
            variable.assign(old + value if weight is MergeWeight.ONE else value)
        return merged, dict(zip(logs, averages, strict=True))

    def _host_merge(
        self, tensors: Sequence[Any], weights: Sequence[MergeWeight], metrics_at: int | None = None
    ) -> list[Any]:
        """The tensors merged over all ranks, by a host call inside the graph."""
        if not tensors:
            return []
        layout: StepLayout | None = None

        def merge(arrays: Sequence[Array]) -> list[Array]:
            nonlocal layout
            if layout is None:
                layout = StepLayout.of(arrays, weights)
            flats = self._merge(layout, arrays, self._share)
            if metrics_at is not None and (self._silent is None or self._silent):
                counted = layout.cut(flats)[metrics_at : metrics_at + len(self._metrics)]
                self._silent = step_logs.still_silent(self._silent, self._model, counted)
            return flats

        dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
        return _cut(tensors, self._on_host(merge, tensors, dtypes))

    def _on_host(
        self, function: Callable[[Sequence[Array]], Sequence[Any]], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> Sequence[Any]:
        """Call a function of arrays in the middle of a step. What it raises is kept: TensorFlow makes an error of its
        own of it."""

        def call(*arrays: Array) -> Sequence[Any]:
            try:
                return function(arrays)
            except BaseException as error:
                self._failure = error
                raise

        if tf.inside_function():
            results: Sequence[Any] = call_in_graph(call, tensors, dtypes)
            return results
        return [tf.convert_to_tensor(array) for array in call(*[tensor.numpy() for tensor in tensors])]

    def read(self, variables: Sequence[Any]) -> list[Array]:
        return [np.array(variable.value) for variable in variables]

    def layer_state(self) -> list[Any]:
        return list(self._state)

    def write(self, values: Sequence[tuple[Any, Array]]) -> None:
        for variable, value in values:
            variable.assign(value)

    def retrace(self) -> None:
        self._make_functions(xla=self._xla)

    def test(self, data: Batch, share: float) -> None:
        before = None if share else [tf.identity(variable.value) for variable in self._metrics]
        self._test_logs = self._run("_test", data, share)
        if before is not None:
            for variable, value in zip(self._metrics, before, strict=True):
                variable.assign(value)

    def merged_metrics(self, share: float, *, final: bool, training: bool = False) -> Mapping[str, Any]:
        logs = self._averages if training else self._test_logs
        own = [tf.identity(variable.value) for variable in self._metrics]
        arrays = [np.asarray(value) for value in own]
        last = share if training else self._share
        arrays += step_logs.weigh_last(list(logs.values()), last, share)
        layout = StepLayout.of(arrays, [*self._weights, *[MergeWeight.SHARE] * len(logs)])
        values = layout.cut(self._merge(layout, arrays, share)) if arrays else []
        for variable, value in zip(self._metrics, values, strict=False):
            variable.assign(value)
        silent = step_logs.silent_metrics(self._model, values[: len(own)])
        averages = dict(zip(logs, values[len(own) :], strict=True))
        origins = self.origins if training else self._test_origins
        results = step_logs.choose_logs(averages, self._model.get_metrics_result, silent, origins.results)
        if not final:
            for variable, value in zip(self._metrics, own, strict=True):
                variable.assign(value)
        return results

    def predict(self, data: Batch, form: ElementStructure = ElementStructure.PARTS) -> Any:
        return tree.map_structure(np.asarray, self._predict(self._packed(_tensors(data), form)))

    def _function(self, function: Callable[..., Any], jit_compile: bool = False) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function

        def of_any_size(data: Batch) -> Any:
            return function(tree.map_structure(_of_any_size, data))

        compiled: Callable[..., Any] = tf.function(
            tf.autograph.experimental.do_not_convert(of_any_size), jit_compile=jit_compile, reduce_retracing=True
        )
        # It would be about calls that trace again: TensorFlow does not see the others, which `_call` makes directly.
        compiled._omit_frequent_tracing_warning = True  # type: ignore[attr-defined]
        return compiled


def _of_any_size(tensor: Any) -> Any:
    """The tensor with the size of its batch unknown, as in Keras's own functions: what a model computes with the
    number of samples must not become a constant of the first part that is traced."""
    if tensor is None or not tensor.shape.rank:
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def _is_of_any_batch(indices: Any) -> bool:
    """Whether as many rows are looked up in a batch of any size: in a graph, where the size of the batch is unknown,
    the number of the others is as well."""
    if isinstance(indices, tf.__internal__.EagerTensor):
        numbers = indices.numpy()
        return len(np.unique(numbers)) == len(numbers)  # the samples of a batch would look up the same
    return bool(indices.shape.is_fully_defined())


def _described(array: Array) -> Any:
    """For Keras, which knows no strings in arrays of NumPy."""
    return tf.convert_to_tensor(array) if array.dtype.kind in "OSU" else array


def _tensors(data: Batch) -> Batch:
    converted: Batch = map_leaves(tf.convert_to_tensor, data)
    return converted


def _kind(data: Any) -> Any:
    """What a trace depends on: structure, shapes and dtypes."""
    if isinstance(data, Mapping):
        return [(name, _kind(value)) for name, value in data.items()]
    if isinstance(data, list | tuple):
        return [type(data), *map(_kind, data)]
    return None if data is None else (data.shape, data.dtype)


def _complete(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """The gradients, zero where the loss does not depend on a weight."""
    return [
        tf.zeros(weight.shape, weight.dtype) if gradient is None else gradient
        for gradient, weight in zip(gradients, weights, strict=True)
    ]


def _assign(values: Sequence[Any], weights: Sequence[Any]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.assign(value)


def _batch_size(x: Any) -> Any:
    return tf.shape(leaves(x)[0])[0]


def _cut(like: Sequence[Any], flats: Sequence[Any]) -> list[Any]:
    """The tensors inside the flat buffers, in the shapes and dtypes of `like`; as `Layout.cut` does."""
    by_dtype = dict(zip(dict.fromkeys(tensor.dtype for tensor in like), flats, strict=True))
    pieces: dict[Any, list[Any]] = {}
    for dtype, flat in by_dtype.items():
        sizes = [tensor.shape.num_elements() for tensor in like if tensor.dtype == dtype]
        flat.set_shape([sum(sizes)])
        pieces[dtype] = tf.split(flat, sizes)
    return [tf.reshape(pieces[tensor.dtype].pop(0), tensor.shape) for tensor in like]


class TensorFlowUpdater(BackendUpdater):
    """See `phalanx.engines.updater.Updater`."""

    def _prepare(self) -> None:
        # One signature, traced once: to find the trace for the arguments of a call takes longer than the update.
        specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in self.variables]
        step = tf.function(tf.autograph.experimental.do_not_convert(self._update))
        self._step = ConcreteCall(
            step.get_concrete_function(*specs), *[tf.zeros(spec.shape, spec.dtype) for spec in specs]
        )
        self._values: list[Array] | None = None

    def _update(self, *gradients: Any) -> list[Any]:
        with fused(self.optimizer):
            self.optimizer.apply(list(gradients), self.variables)
        return [variable.value.read_value() for variable in self.variables]

    def apply(self, gradients: Sequence[Any]) -> None:
        # No copies: TensorFlow makes one when it updates a variable whose memory somebody looks at.
        self._values = [np.asarray(value) for value in self._step(*map(tf.convert_to_tensor, gradients))]

    def values(self) -> list[Any]:
        if self._values is None:
            self._values = [variable.value.read_value().numpy() for variable in self.variables]
        return self._values

    def load(self, values: Mapping[int, Any], state: Mapping[int, Any]) -> None:
        self._values = None
        for number, value in values.items():
            self.variables[number].assign(value)
        for number, value in state.items():
            self.optimizer.variables[number].assign(value)

    def fetch(self, values: Sequence[int], state: Sequence[int]) -> tuple[list[Any], list[Any]]:
        own = self.optimizer.variables
        return [self.variables[n].value.numpy() for n in values], [own[n].value.numpy() for n in state]


class TensorFlowTensors:
    """See `phalanx.engines.tensors.Tensors`."""

    merges_in_apply = True

    def from_host(self, array: Array) -> Any:
        return tf.convert_to_tensor(array)

    def call(
        self,
        function: HostFunction,
        tensors: Sequence[Any],
        *,
        shape_of: Callable[[Shape], Shape] = same_shape,
        gradient: Gradient | None = None,
    ) -> list[Any]:
        if any(isinstance(tensor, tf.RaggedTensor) for tensor in tensors):
            raise UnsupportedError(
                "Ragged tensors of several replicas cannot be merged: their rows differ in length. Merge what you "
                "compute of them, or tensor.to_tensor() where the replicas' shapes agree."
            )
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]  # of sparse gradients too
        if gradient is None:
            return _on_host(function, tensors, _shapes_of(shape_of, tensors))
        floating = [i for i, tensor in enumerate(tensors) if tensor.dtype.is_floating]
        kinds = [tensors[i].shape for i in floating]
        shapes = [
            each.as_list() if each.is_fully_defined() else tf.shape(tensors[i])
            for i, each in zip(floating, kinds, strict=True)
        ]

        def of_all(arrays: list[Array]) -> list[Array]:
            flowing, lengths = arrays[: len(floating)], arrays[len(floating) :]
            return gradient(flowing, [tuple(map(int, each)) for each in lengths])

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def there(*values: Any) -> Any:
            return _on_host(function, values, _shapes_of(shape_of, values)), lambda *grads: placed(back(*picked(grads)))

        # The function is linear, and so is its gradient, whose own gradient is the function.
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def back(*flowing: Any) -> Any:
            own = _on_host(of_all, [*flowing, *map(tf.convert_to_tensor, shapes)], kinds)
            return own, lambda *upstream: picked(there(*placed(upstream, tf.zeros_like)))

        def picked(every: Sequence[Any]) -> list[Any]:
            return [tf.convert_to_tensor(every[i]) for i in floating]

        def placed(own: Sequence[Any], other: Callable[[Any], Any] = lambda tensor: None) -> list[Any]:
            given = iter(own)
            return [next(given) if i in floating else other(tensor) for i, tensor in enumerate(tensors)]

        return list(there(*tensors))

    @staticmethod
    def failure_behind(error: BaseException) -> BaseException | None:
        if isinstance(error, tf.errors.InvalidArgumentError) and "PyFunc" in str(error) and "XLA" in str(error):
            return UnsupportedError(
                "A merge over the replicas (apply_gradients, strategy.reduce, ...) cannot be compiled by XLA "
                "(tf.function(jit_compile=True)): compile the part that computes gradients, and call the rest from a "
                "tf.function without."
            )
        if not _failures or not isinstance(error, tf.errors.OpError | RuntimeError):
            return None
        failure = _failures.pop()
        first_line = str(failure).partition("\n")[0]
        named = type(failure).__name__ in str(error) if isinstance(error, tf.errors.OpError) else bool(first_line)
        return failure if named and first_line[:80] in str(error) else None

    @staticmethod
    def trace_apart(key: Callable[[], Hashable | None]) -> None:
        trace_apart(key)

    def reduce(self, thing: Any) -> Any:
        if isinstance(thing, tf.types.experimental.PolymorphicFunction):
            # Its own pickle holds what was traced here, which cannot travel; it is traced anew.
            options = {
                "input_signature": thing.input_signature,
                "autograph": thing._autograph,
                "jit_compile": thing._jit_compile,
                "reduce_retracing": thing._reduce_retracing,
            }
            return _function, (_unbound(thing.python_function), options)
        if isinstance(thing, tf.RaggedTensor):
            return _ragged, (thing.values, thing.row_splits)
        if isinstance(thing, tf.SparseTensor):
            return tf.SparseTensor, (thing.indices, thing.values, thing.dense_shape)
        if isinstance(thing, tf.data.Dataset):
            graph = tf.raw_ops.DatasetToGraphV2(input_dataset=thing._variant_tensor)
            return _dataset, (graph.numpy(), thing.element_spec)
        return NotImplemented


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a `tf.function` calls, without the weak references by which TensorFlow binds one that is a method."""
    target: Any = getattr(getattr(function, "__original_wrapped__", None), "__self__", None)
    if type(target).__name__ != "TfMethodTarget":
        return function
    if target.target is None:
        raise UnsupportedError(f"The object whose method {function.__qualname__} is does not exist any more.")
    return MethodType(target.weakrefself_func__(), target.target)


def _function(python_function: Callable[..., Any], options: dict[str, Any]) -> Any:
    return tf.function(python_function, **options)


def _ragged(values: Any, row_splits: Any) -> Any:
    return tf.RaggedTensor.from_row_splits(values, row_splits)


def _dataset(graph: bytes, element_spec: Any) -> Any:
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def _shapes_of(shape_of: Callable[[Shape], Shape], tensors: Sequence[Any]) -> list[Shape | None]:
    return [None if tensor.shape.rank is None else shape_of(tensor.shape.as_list()) for tensor in tensors]


_failures: list[BaseException] = []
"""How the last call of a host function ended: TensorFlow makes an error of its own of it, and Keras may, where it calls
a layer."""


def _on_host(function: HostFunction, tensors: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """The results, as many as `shapes`, in the dtypes of the first tensors."""

    def call(*arrays: Array) -> list[Array]:
        _failures.clear()
        try:
            return function(list(arrays))
        except BaseException as error:
            _failures.append(error)
            raise

    if not tf.inside_function():
        return [tf.convert_to_tensor(array) for array in call(*[tensor.numpy() for tensor in tensors])]
    dtypes = [tensor.dtype for tensor in tensors[: len(shapes)]]
    results = call_in_graph(call, tensors, dtypes)
    for shape, result in zip(shapes, results, strict=True):
        result.set_shape(shape)
    return list(results)
