"""Keras models on PyTorch.

PyTorch runs eagerly, so a step stops where its gradients are complete, merges them with everything else that the step
changed (metric increments, batch-norm statistics, logs), and continues with the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import keras
import numpy as np
import torch
from keras import tree

from phalanx.arrays.tree import map_leaves, map_non_none
from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines import step_logs
from phalanx.engines.accelerations import registry
from phalanx.engines.accelerations.torch_onednn_matmul import OneDNNMatmul
from phalanx.engines.engine import Batch, Merge, ModelValues
from phalanx.engines.merge_collectives import MergeCollectives
from phalanx.engines.replica.replica_engine import ReplicaEngine, fill_missing_gradients, variables_of_optimizers
from phalanx.engines.replica.torch.accelerated_updates import AcceleratedUpdates
from phalanx.engines.replica.torch.host_copies import all_to_host, cut_merged, from_host, to_host
from phalanx.engines.replica.torch.module_buffers import buffers
from phalanx.engines.replica.torch.torch_tensors import TorchTensors
from phalanx.engines.step_layout import MergeWeight, StepLayout, gradient_weights
from phalanx.keras_compat import model_state
from phalanx.keras_compat.global_batch.global_gradients import GlobalGradients
from phalanx.keras_compat.global_batch.global_losses import GloballyScaledLosses
from phalanx.keras_compat.global_batch.optimizer_applies import merging_applies
from phalanx.keras_compat.global_batch.step_collectives import PREDICTION, StepScope
from phalanx.keras_compat.global_batch.step_means import WeightedStepMeans
from phalanx.keras_compat.layer_building import has_built_layers
from phalanx.keras_compat.torch_internals import convert_to_tensor, get_device

Array = np.ndarray[Any, Any]


class TorchEngine(ReplicaEngine):
    """Steps of one Keras model on the PyTorch backend; see `phalanx.engines.engine.Engine`."""

    def __init__(self, model: Any, merge: Merge) -> None:
        if model.steps_per_execution > 1:  # as Keras on PyTorch
            raise ValueError(
                f"`steps_per_execution` must be 1 with the PyTorch backend; the model was compiled with "
                f"steps_per_execution={model.steps_per_execution}."
            )
        self._variables = TorchVariables()
        super().__init__(model, merge, self._variables)
        self._state: list[Any] = []  # of layers and modules; set by `build`
        self._averages: dict[str, Any] = {}
        self._never_updated: frozenset[str] | None = None
        self._backward = torch.compile(self._run_backward) if model.jit_compile else self._run_backward
        # By the weights that have a gradient (their ids; the model holds them) and the names of the logs. A program may
        # freeze and unfreeze layers between two steps, so positions among the trainable weights are not enough.
        self._layouts: dict[tuple[tuple[int, ...], tuple[str, ...]], StepLayout] = {}
        self._device = torch.device(get_device())
        self._collectives = MergeCollectives(merge, TorchTensors().call)
        self._losses = GloballyScaledLosses()
        self._products = registry.choose("torch_onednn_matmul", OneDNNMatmul, nullcontext)()
        means, in_step = WeightedStepMeans(lambda: self._share), StepScope(self._collectives)
        self._contexts: tuple[AbstractContextManager[Any], ...] = self._losses, means, in_step, self._products
        self._updates = AcceleratedUpdates()

    def build(self, data: Batch) -> None:
        # Losses and layers may draw numbers for each sample, but initial weights follow from the program's generators.
        with self.random_state_context() if has_built_layers(self._model) else nullcontext():
            self._model._symbolic_build(data_batch=self._batches.for_keras(data))
        floating = [buffer for buffer in buffers(self._model) if buffer.value.is_floating_point()]
        self._state = [*_layer_state(self._model), *floating]
        self._set_variables()
        self._layouts.clear()  # built with the previous state and metrics

    def layer_state(self) -> list[Any]:
        return list(self._state)

    def retrace(self) -> None:
        self._layouts.clear()

    def train(self, data: Batch, share: float) -> None:
        # Layers write to these in the forward pass, before the merge, which may fail. Weights and optimizer follow the
        # merge, unless a custom `train_step` applies first and merges the rest at its end.
        changed = list(self._state)
        is_overridden = model_state.overrides(self._model, "train_step")
        if self._merge.repeats_steps and is_overridden:
            changed += variables_of_optimizers(self._model)
        state_before = self._variables.copies(changed)
        metrics_before = self._variables.copies(self._metrics)
        with torch.no_grad():
            for variable, rule in zip(self._metrics, self.metric_rules.rules, strict=True):
                if rule.is_additive:
                    variable.value.zero_()
        try:
            run = self._train_overridden if is_overridden else self._train_own
            self._begin(data, share)
            losses, means, in_step, products = self._contexts
            with losses, means, in_step, products, self.random_state_context():
                run(_to_device(data), metrics_before)
        except BaseException:
            self._variables.write([*changed, *self._metrics], [*state_before, *metrics_before])
            raise

    def _begin(self, data: Batch, share: float) -> None:
        self._share = self._collectives.share = share
        self._losses.batch_size = model_state.samples(data)

    def _train_own(self, data: Batch, metrics_before: list[Any]) -> None:
        weights, gradients, logs = self._backward(data)
        if self._merge.updates_weights:
            gradients = fill_missing_gradients(gradients, weights)
        own = [weight for weight, gradient in zip(weights, gradients, strict=True) if gradient is not None]
        gradients = map_non_none(lambda present: self._merge_all(own, present, logs, metrics_before), gradients)
        if self._merge.updates_weights:
            _assign_known(gradients, weights)
            return
        # Callbacks may read them, such as to log their norm.
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                weight.value.grad = gradient
        if weights:  # as in Keras: loss scaling would count a step without weights as one without an overflow
            with torch.no_grad(), self._updates(self._model.optimizer):
                self._model.optimizer.apply(gradients, weights)

    def _run_backward(self, data: Batch) -> tuple[list[Any], list[Any], dict[str, Any]]:
        # As TorchTrainer.train_step, up to the optimizer. Metrics come first, to be merged with the gradients.
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._batches.for_keras(data))
        y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
        weights = list(model.trainable_weights)
        for weight in weights:
            # As `zero_grad`: gradients left by another step would be added to.
            weight.value.grad = None
        own = GlobalGradients(model.optimizer)
        loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        with torch.no_grad():
            _count_loss(model._loss_tracker, loss.detach(), model_state.samples(x))
        if weights:
            own.scale_loss(loss).backward()
        with torch.no_grad():
            logs = self._update_metrics(x, y, y_pred, sample_weight)
            return weights, own.to_merge([weight.value.grad for weight in weights], weights), logs

    def _update_metrics(self, *batch: Any) -> dict[str, Any]:
        """Add a batch to the metrics. Returns the model's own logs of it."""
        if not model_state.overrides(self._model, "compute_metrics"):
            return model_state.update_metrics(self._model, *batch)
        with self.origins.watched() as find:
            return find(model_state.update_metrics(self._model, *batch))

    def _train_overridden(self, data: Batch, metrics_before: list[Any]) -> None:
        assign = _assign_known if self._merge.updates_weights else None
        merging = merging_applies(self._model, self._merge_gradients, self._updates, assign)
        with merging, self.origins.watched() as find:
            logs = find(self._model.train_step(self._batches.pack(data)))
        self._merge_all([], [], logs, metrics_before)

    def _merge_gradients(self, gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        """Return the merged gradients of some weights, or what replaces them; see `merging_applies`."""
        if self._merge.updates_weights:
            gradients = fill_missing_gradients(gradients, weights)
        own = [weight for weight, gradient in zip(weights, gradients, strict=True) if gradient is not None]

        def merge(present: list[Any]) -> list[Any]:
            if not present:
                return []
            arrays = all_to_host(present)
            return self._merged(StepLayout.of(arrays, gradient_weights(own), own), arrays)[1]

        return map_non_none(merge, gradients)

    def _merged(self, layout: StepLayout, arrays: Sequence[Array]) -> tuple[list[Array], list[Any]]:
        """Return the merged arrays, also as tensors. A later merge overwrites both."""
        return cut_merged(layout, self._merge(layout, arrays, self._share), self._device)

    def _merge_all(
        self, weights: Sequence[Any], gradients: list[Any], logs: dict[str, Any], metrics_before: list[Any]
    ) -> list[Any]:
        """Merge gradients, state, metrics and logs in one call. Returns the gradients, and assigns the others.

        Args:
            weights: The weights that have a gradient in this step.
            gradients: The gradients of `weights`.
            logs: The logs that the step computed itself.
            metrics_before: The metrics' values before the step.
        """
        values = [*gradients, *(variable.value for variable in (*self._state, *self._metrics))]
        own = [np.asarray(keras.ops.convert_to_numpy(value), np.float32) for value in logs.values()]
        arrays = [*all_to_host(values), *own]
        key = (tuple(map(id, weights)), tuple(logs))
        layout = self._layouts.get(key)
        if layout is None:
            counted = [*gradient_weights(weights), *[MergeWeight.SHARE] * len(self._state)]
            of_all = [*counted, *self.metric_rules.weights, *[MergeWeight.SHARE] * len(logs)]
            layout = self._layouts[key] = StepLayout.of(arrays, of_all, weights)
        # Both are views of the merge's buffers, which the call after the next one overwrites, so values are copied into
        # variables.
        arrays, tensors = self._merged(layout, arrays)
        of_state, of_metrics, of_logs = accumulate((len(gradients), len(self._state), len(self._metrics)))
        self._never_updated = step_logs.metrics_never_updated(
            self._never_updated, self._model, arrays[of_metrics:of_logs]
        )
        with torch.no_grad():
            for variable, value in zip(self._state, tensors[of_state:of_metrics], strict=True):
                variable.value.copy_(value)
            for variable, value, rule, before in zip(
                self._metrics,
                tensors[of_metrics:of_logs],
                self.metric_rules.rules,
                metrics_before,
                strict=True,
            ):
                variable.value.copy_(value)
                if rule.is_additive:
                    variable.value.add_(before)
        self._averages = dict(zip(logs, arrays[of_logs:], strict=True))
        return tensors[:of_state]

    def logs(self) -> Mapping[str, Any]:
        silent = self._never_updated or frozenset()
        return step_logs.choose_logs(self._averages, self._model.get_metrics_result, silent, self.origins)

    def _custom_logs(self) -> Mapping[str, Any]:
        return self._averages

    def _metric_read_scope(self) -> AbstractContextManager[Any]:
        no_grad: AbstractContextManager[Any] = torch.no_grad()
        return no_grad

    def test(self, data: Batch, share: float) -> None:
        before = None if share else self._variables.copies(self._metrics)
        self._begin(data, share)
        differ = model_state.logs_differ_from_metrics(self._model, "test_step")
        watched = self._test_origins.watched(may_differ=differ)
        losses, means, in_step, products = self._contexts
        with torch.no_grad(), losses, means, in_step, products, watched as find, self.random_state_context():
            logs = find(self._model.test_step(self._batches.pack(_to_device(data))))
            if before is not None:
                self._variables.write(self._metrics, before)
        self._test_logs = logs if differ else {}

    def predict(self, data: Batch, structure: ElementStructure = ElementStructure.PARTS, share: float = 1.0) -> Any:
        self._share = share
        _, means, _, products = self._contexts
        counting = means if self.predictions_update_metrics else nullcontext()
        with torch.no_grad(), products, counting, StepScope(PREDICTION), self.random_state_context():
            outputs = self._model.predict_step(self._batches.pack(_to_device(data), structure))
        return tree.map_structure(to_host, outputs)


class TorchVariables(ModelValues):
    """See `ModelValues`."""

    def copies(self, variables: Sequence[Any]) -> list[Any]:
        """Return tensors that keep the current values."""
        return [variable.value.clone() for variable in variables]

    def read(self, variables: Sequence[Any]) -> list[Array]:
        return [np.array(to_host(variable.value)) for variable in variables]

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        with torch.no_grad():
            for variable, value in zip(variables, values, strict=True):
                # NumPy arithmetic returns scalars for arrays without axes, which PyTorch does not accept as arrays.
                variable.value.copy_(value if isinstance(value, torch.Tensor) else from_host(np.asarray(value)))


def _layer_state(model: Any) -> list[Any]:
    """Return the layers' state without the frozen parameters of PyTorch modules, which Keras tracks as state but which
    do not change."""
    modules = [layer.module for layer in model._flatten_layers() if isinstance(layer, keras.layers.TorchModuleWrapper)]
    parameters = {id(parameter) for module in modules for parameter in module.parameters()}
    return [variable for variable in model_state.layer_state(model) if id(variable.value) not in parameters]


def _to_device(data: Batch) -> Batch:
    converted: Batch = map_leaves(convert_to_tensor, data)
    return converted


def _assign_known(values: Sequence[Any], weights: Sequence[Any]) -> None:
    """Assign values to the weights. Weights whose value is None keep theirs."""
    known = [(weight.value, value) for weight, value in zip(weights, values, strict=True) if value is not None]
    if not known:
        return
    with torch.no_grad():
        torch._foreach_copy_([old for old, _ in known], [new for _, new in known])


def _count_loss(tracker: Any, loss: Any, samples: int) -> None:
    """Run `tracker.update_state(loss, samples)` as two additions. Keras takes twenty operations, 0.1 ms."""
    masked = getattr(loss, "_keras_mask", None) is not None
    if type(tracker) is keras.metrics.Mean and not loss.ndim and not masked and tracker.dtype == str(loss.dtype)[6:]:
        tracker.total.value.add_(loss * samples)
        tracker.count.value.add_(samples)
    else:
        tracker.update_state(loss, sample_weight=samples)
