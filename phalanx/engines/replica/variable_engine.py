"""What engines share whose state is in the model's variables: those of TensorFlow and PyTorch.

A step merges the gradients together with everything else that it changed: layer state, what the metrics counted, logs.
A model that overrides `train_step` calls the optimizer itself; there the gradients are merged inside
`optimizer.apply`, and the rest afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras
import numpy as np

from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines import step_logs
from phalanx.engines.batch_packing import BatchPacking
from phalanx.engines.engine import Batch, MergeProtocol
from phalanx.engines.metric_rules import MetricRules
from phalanx.engines.step_layout import MergeWeight, StepLayout, gradient_weights
from phalanx.keras_compat import model_state
from phalanx.keras_compat.log_origins import LogOrigins

Array = np.ndarray[Any, Any]


class VariableAccess(Protocol):
    """How a backend's variables are read and written."""

    def copies(self, variables: Sequence[Any]) -> list[Any]:
        """Tensors that keep the present values."""
        ...

    def assign(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Give variables new values, tensors of the backend or arrays."""
        ...

    def to_host(self, value: Any) -> Array:
        """A tensor or number as an array; it may share the tensor's memory."""
        ...

    def without_gradients(self) -> AbstractContextManager[Any]:
        """A context in which nothing is recorded for differentiation."""
        ...


class VariableEngine(ABC):
    """The common half of `TensorFlowEngine` and `TorchEngine`; see `phalanx.engines.engine.Engine`.

    Attributes:
        state: the floating variables that layers change while they compute; known after `build`.
        metric_rules: how the variables of the metrics are merged; likewise.
    """

    in_variables = True

    def __init__(self, model: Any, merge: MergeProtocol, access: VariableAccess) -> None:
        self._model = model
        self._merge = merge
        self._access = access
        self._batches = BatchPacking()
        self._share = 1.0
        self._averages: dict[str, Any] = {}
        self._silent: frozenset[str] | None = None
        self._test_logs: dict[str, Any] = {}
        self.metric_rules = MetricRules(self.read, access.assign)
        self.origins = LogOrigins(model)
        self._test_origins = LogOrigins(model)

    def _note_variables(self, state: list[Any]) -> None:
        """Call at the end of `build`: check the model, and note which of its variables a step merges."""
        model_state.check_losses(self._model)
        model_state.check_layers(self._model)
        self._state = state
        self.metric_rules.note(self._model.metrics_variables)

    @property
    def _metrics(self) -> list[Any]:
        return self.metric_rules.variables

    def expect(self, form: ElementStructure) -> None:
        if form is not self._batches.form:
            self._batches.form = form
            self.retrace()

    @abstractmethod
    def retrace(self) -> None: ...

    # The state is always in the variables, so there is nothing to fetch or to put back.

    def begin(self) -> None:  # noqa: B027
        pass

    def end(self) -> None:  # noqa: B027
        pass

    def warm(self, data: Batch, share: float) -> Callable[[], None] | None:
        return None  # a step takes batches of any size

    def read(self, variables: Sequence[Any]) -> list[Array]:
        return [np.array(self._access.to_host(variable.value)) for variable in variables]

    def write(self, values: Sequence[tuple[Any, Array]]) -> None:
        self._access.assign([variable for variable, _ in values], [value for _, value in values])

    def layer_state(self) -> list[Any]:
        return list(self._state)

    def merged_metrics(
        self, share: float, start: Sequence[Array], *, final: bool, training: bool = False
    ) -> Mapping[str, Any]:
        access, rules = self._access, self.metric_rules
        logs = self._averages if training else self._test_logs
        own = access.copies(self._metrics)
        arrays = rules.added([access.to_host(value) for value in own], start)
        last = share if training else self._share
        arrays += step_logs.weigh_last([access.to_host(value) for value in logs.values()], last, share)
        layout = StepLayout.of(arrays, [*rules.weights, *[MergeWeight.SHARE] * len(logs)])
        values = layout.cut(self._merge(layout, arrays, share)) if arrays else []
        averages = dict(zip(logs, values[len(own) :], strict=True))
        with access.without_gradients():
            access.assign(self._metrics, rules.with_start(values[: len(own)], start))
            silent = step_logs.silent_metrics(self._model, values[: len(own)])
            origins = self.origins if training else self._test_origins
            results = step_logs.choose_logs(averages, self._model.get_metrics_result, silent, origins)
            if not final:
                results = keras.tree.map_structure(self._number, results)
                access.assign(self._metrics, own)
        return results

    def _gradient_weights(self, present: Sequence[int]) -> list[MergeWeight]:
        """How the gradients of these trainable weights count in a merge."""
        weights = self._model.trainable_weights
        return gradient_weights([weights[index] for index in present])

    def _variables_of_optimizers(self) -> list[Any]:
        """What a custom `train_step` has changed if it fails after its gradients were merged and applied."""
        optimizers = model_state.optimizers(self._model)
        return [*self._model.trainable_variables, *(v for optimizer in optimizers for v in optimizer.variables)]

    def _number(self, result: Any) -> Any:
        """A metric's result, which does not change when the metric counts on; some results are arrays."""
        value = np.array(self._access.to_host(result))
        return value if value.ndim else float(value)
