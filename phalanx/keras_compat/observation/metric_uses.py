"""Observes in which order a step uses metrics: replicas merge what a step adds to them after the step.

Overrides `reset_state`, `update_state` and `result` of metrics, and a step of the model. Tested with Keras 3.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from phalanx.keras_compat.observation.log_origins import metrics_of
from phalanx.keras_compat.patching import overridden_methods


class MetricUses:
    """Observed uses of a model's metrics in steps that run or are traced.

    Attributes:
        reset_metric: Name of a metric that a step has reset; "" if none.
        early_read_metric: Name of a metric whose result a step has read before it updated the metric, and not again.
        early_logged_metric: Name of a metric for which a step logs such a result.
    """

    def __init__(self) -> None:
        self.reset_metric = self.early_read_metric = self.early_logged_metric = ""
        self._is_in_step = False
        self._early: dict[int, bool] = {}  # by metric: whether it was updated since its last result
        self._results: dict[int, Any] = {}  # by metric, its last result

    @contextmanager
    def watched(self, model: Any, step: str) -> Iterator[None]:
        """Context in which steps of this name are watched."""
        with ExitStack() as stack:
            stack.enter_context(overridden_methods(model, **{step: self._watching(getattr(model, step), model)}))
            for metric in metrics_of(model):
                stack.enter_context(
                    overridden_methods(
                        metric,
                        reset_state=self._noting(self._reset, metric, metric.reset_state),
                        update_state=self._noting(self._update, metric, metric.update_state),
                        result=self._noting(self._read, metric, metric.result),
                    )
                )
            yield

    def _watching(self, step: Callable[..., Any], model: Any) -> Callable[..., Any]:
        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._is_in_step, self._early, self._results = True, {}, {}
            try:
                returned = step(*args, **kwargs)
            finally:
                self._is_in_step = False
            self._note_early(model, returned[0] if isinstance(returned, tuple) else returned)
            return returned

        return watched

    def _note_early(self, model: Any, logs: Any) -> None:
        early = [metric for metric in metrics_of(model) if self._early.get(id(metric))]
        self.early_read_metric = self.early_read_metric or next((metric.name for metric in early), "")
        logged = {id(value) for value in logs.values()} if isinstance(logs, Mapping) else set()
        # If a step logs the names of all metrics, Keras takes their results at the end.
        if not logged or logs.keys() == {metric.name for metric in model.metrics}:
            return
        found = (metric.name for metric in early if id(self._results[id(metric)]) in logged)
        self.early_logged_metric = self.early_logged_metric or next(found, "")

    def _noting(self, note: Callable[[Any, Any], None], metric: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            returned = method(*args, **kwargs)
            if self._is_in_step:
                note(metric, returned)
            return returned

        return noted

    def _reset(self, metric: Any, _: Any) -> None:
        self.reset_metric = self.reset_metric or metric.name

    def _update(self, metric: Any, _: Any) -> None:
        if id(metric) in self._early:
            self._early[id(metric)] = True

    def _read(self, metric: Any, result: Any) -> None:
        self._early[id(metric)] = False
        self._results[id(metric)] = result
