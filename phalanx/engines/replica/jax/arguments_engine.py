"""What the engines on JAX share: the state of the model travels as arguments and results of compiled functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.data.dataset_elements import ElementStructure
from phalanx.engines.batch_packing import BatchPacking
from phalanx.engines.metric_rules import MetricRules
from phalanx.engines.replica.jax.model_arguments import ModelArguments
from phalanx.keras_compat import model_state

Array = np.ndarray[Any, Any]


class ArgumentsEngine(ABC):
    """The common half of `JaxEngine` and `SpmdEngine`; see `phalanx.engines.engine.Engine`."""

    def __init__(self, model: Any, arguments: ModelArguments) -> None:
        self._model = model
        self._arguments = arguments
        self._batches = BatchPacking()
        self.metric_rules = MetricRules(arguments.read_metrics, arguments.write_metrics)
        self._logs: dict[str, Any] = {}  # of the newest training step

    @abstractmethod
    def retrace(self) -> None:
        """See `Engine.retrace`."""

    def expect(self, form: ElementStructure) -> None:
        if form is not self._batches.form:
            self._batches.form = form
            self.retrace()

    @property
    def builds_from_a_batch(self) -> bool:
        return model_state.is_unbuilt(self._model)

    @property
    def in_variables(self) -> bool:
        return self._arguments.in_variables

    def begin(self) -> None:
        self._arguments.begin()

    def end(self) -> None:
        self._arguments.end()

    def read(self, variables: Sequence[Any]) -> list[Array]:
        return self._arguments.read(variables)

    def write(self, values: Sequence[tuple[Any, Array]]) -> None:
        self._arguments.write(values)

    def layer_state(self) -> list[Any]:
        return model_state.layer_state(self._model)

    def logs(self) -> Mapping[str, Any]:
        return self._logs
