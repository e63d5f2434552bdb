"""The common part of engines that merge steps over the ranks, where each process computes a part of the batch.

A step merges the gradients with everything else that it changed: layer state, metric counts, logs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from phalanx.engines import step_logs
from phalanx.engines.engine import Engine, Merge, ModelValues
from phalanx.engines.step_layout import MergeWeight, StepLayout
from phalanx.keras_compat import model_state
from phalanx.keras_compat.observation.log_origins import LogOrigins
from phalanx.keras_compat.variables.host_values import host_copy, to_host

Array = np.ndarray[Any, Any]


class ReplicaEngine(Engine):
    """The common part of `JaxEngine`, `TensorFlowEngine` and `TorchEngine`; see `Engine`."""

    def __init__(self, model: Any, merge: Merge, values: ModelValues) -> None:
        super().__init__(model, values)
        self._merge = merge
        self._share = 1.0  # of the newest step
        self._test_logs: Mapping[str, Any] = {}
        self._test_origins = LogOrigins(model)

    @property
    def _metrics(self) -> list[Any]:
        return self.metric_rules.variables

    def _set_variables(self) -> None:
        """Check the model, and record which of its variables a step merges. Call at the end of `build`."""
        model_state.check_losses(self._model)
        model_state.check_layers(self._model)
        self.metric_rules.set_variables(self._model.metrics_variables)

    @abstractmethod
    def _custom_logs(self) -> Mapping[str, Any]:
        """Return the logs that the newest training step computed itself."""

    def _metric_read_scope(self) -> AbstractContextManager[Any]:
        """Context in which the metrics compute their results from the newest values."""
        return nullcontext()

    def merged_metrics(
        self, share: float, start: Sequence[Array], *, final: bool, training: bool = False
    ) -> Mapping[str, Any]:
        rules, origins = self.metric_rules, self.origins if training else self._test_origins
        logs, last = (self._custom_logs(), share) if training else (self._test_logs, self._share)
        own = rules.values()
        weighed = step_logs.scale_last_logs(list(map(to_host, logs.values())), last, share)
        merged, means = self._merge_increments(share, rules.increments(own, start), weighed)
        averages = dict(zip(logs, means, strict=True))
        silent = step_logs.metrics_without_updates(self._model, merged)
        rules.set_values(rules.add_start(merged, start))
        with self._metric_read_scope():
            results = step_logs.choose_logs(averages, self._model.get_metrics_result, silent, origins)
        if not final:
            results = keras.tree.map_structure(_to_constant, results)
            rules.set_values(own)
        return results

    def merge_metrics(self, share: float, start: Sequence[Array]) -> None:
        rules = self.metric_rules
        merged, _ = self._merge_increments(share, rules.increments(rules.values(), start), ())
        rules.set_values(rules.add_start(merged, start))

    def _merge_increments(
        self, share: float, added: Sequence[Array], logs: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Return the sums over all ranks of what they added to the metrics, and the means of their logs."""
        arrays = [*added, *logs]
        layout = StepLayout.of(arrays, [*self.metric_rules.weights, *[MergeWeight.SHARE] * len(logs)])
        values = layout.unpack(self._merge(layout, arrays, share)) if arrays else []
        return values[: len(added)], values[len(added) :]


def _to_constant(result: Any) -> Any:
    """Return a metric's result as a value that later updates do not change. Some results are arrays."""
    value = host_copy(result)
    return value if value.ndim else float(value)


def variables_of_optimizers(model: Any) -> list[Any]:
    """Return the weights and optimizer variables that a custom `train_step` may have changed before it fails."""
    optimizers = model_state.optimizers(model)
    return [*model.trainable_variables, *(v for optimizer in optimizers for v in optimizer.variables)]


def fill_missing_gradients(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """Return the gradients, with zeros where the loss does not depend on a weight."""
    return [
        keras.ops.zeros(weight.shape, weight.dtype) if gradient is None else gradient
        for gradient, weight in zip(gradients, weights, strict=True)
    ]
