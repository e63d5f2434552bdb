"""Which of a step's logs are results of metrics, so that they can be computed again from what all ranks counted.

A step logs what it saw: one rank's part of a batch. The results of metrics are replaced by name. But a step may log a
result under another name (`{"loss": self.total.result()}`), or another number under the name of a metric whose result
it does not request, and `compute_metrics` may log values that it derives from results (F1 of precision and recall). So
the origins of logs are tracked by the identity of the values that a step passes on.

Overrides `result` and `update_state` of metrics and `compute_metrics` of the model. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import keras

from phalanx.keras_compat.keras_internals import in_stateless_scope
from phalanx.keras_compat.model_state import flat_logs
from phalanx.keras_compat.patching import overridden_methods

FindOrigins = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Takes the logs that a step returned, and returns them flat."""


class _Origin(NamedTuple):
    """A metric, or None for `compute_metrics`, and the key of one of its numbers."""

    metric: Any
    key: str | None


class LogOrigins:
    """The origins of the logs of a model's step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # For the step that runs or is traced: each metric result, in the order of computation.
        self._seen: list[tuple[Any, _Origin]] = []
        # For each set of logs that a step has returned, by their names: those that are results under other names, and
        # the nesting. A compiled step is watched when it is traced. One trace may log what another does not.
        self._found: dict[frozenset[str], dict[str, _Origin]] = {}
        self._requested: dict[frozenset[str], set[str]] = {}  # the names of all results that the step has requested
        self._forms: dict[frozenset[str], Mapping[str, Any]] = {}
        self._looks_at_batch = False  # whether `compute_metrics` does

    @contextmanager
    def watched(self, *, may_differ: bool = True) -> Iterator[FindOrigins]:
        """Context for a step that runs or is traced. Yields a function to call with the logs that the step returned,
        which returns them flat.

        Args:
            may_differ: Whether they may contain more than results under the names of their metrics.
        """
        if not may_differ:
            yield flat_logs
            return
        model = self._model
        metrics = metrics_of(model)
        compute = model.compute_metrics
        self._seen = []

        @functools.wraps(compute)
        def computed(*args: Any, **kwargs: Any) -> Any:
            return self._note(None, compute(*args, **kwargs))

        with ExitStack() as stack:
            stack.callback(self._seen.clear)
            for metric in metrics:
                stack.enter_context(overridden_methods(metric, result=_noting(self._note, metric, metric.result)))
            stack.enter_context(overridden_methods(model, compute_metrics=computed))
            yield self._find

    def results(self, names: Iterable[str]) -> dict[str, Any]:
        """Return those of the named logs that are results of metrics under other names, for the metrics' current
        state."""
        found = self._found.get(frozenset(names), {})
        if not found:
            return {}
        known: dict[int, Any] = {}
        computed = self._compute() if any(origin.metric is None for origin in found.values()) else {}
        logs = {}
        for name, (metric, key) in found.items():
            if metric is None:
                if key is not None and key in computed:
                    logs[name] = computed[key]
                continue
            if id(metric) not in known:
                known[id(metric)] = _parts(metric.result())
            logs[name] = known[id(metric)][key]
        return logs

    def may_be_result(self, name: str, names: Iterable[str]) -> bool:
        """Whether a step that logs `names` may log a metric's result under `name`, the name of the metric."""
        asked = self._requested.get(frozenset(names))
        return asked is None or name in asked

    def nested(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Nest the flat logs of a step as the step returned them. Keras sorts them level by level."""
        form = self._forms.get(frozenset(logs))
        return _nested(form, logs) if form else dict(logs)

    def _note(self, metric: Any, result: Any) -> Any:
        # The values are kept, because the identity of a deleted object may be reused.
        self._seen += [(value, _Origin(metric, key)) for key, value in _parts(result).items()]
        return result

    def _find(self, nested: Mapping[str, Any]) -> dict[str, Any]:
        logs = flat_logs(nested)
        names = frozenset(logs)
        self._forms[names] = _names_in(nested)
        # The first entry is nearest to the metric: `compute_metrics` returns results of metrics.
        origins = {id(value): origin for value, origin in reversed(self._seen)}
        found = {name: origins[id(value)] for name, value in logs.items() if id(value) in origins}
        self._requested[names] = {str(o.key or getattr(o.metric, "name", "")) for _, o in self._seen}
        self._found[names] = {name: origin for name, origin in found.items() if not _is_named_so(origin, name)}
        return logs

    def _compute(self) -> Mapping[str, Any]:
        """Return the logs that `compute_metrics` derives from results alone; nothing if it reads the batch."""
        if self._looks_at_batch:
            return {}
        absent = _Absent()
        # The step has already assigned what it assigns. (A scope inside another one would not see its values.)
        scope = nullcontext() if in_stateless_scope() else keras.StatelessScope()
        try:
            with ExitStack() as stack, scope:
                for metric in metrics_of(self._model):
                    stack.enter_context(overridden_methods(metric, update_state=_nothing))
                logs: Mapping[str, Any] = self._model.compute_metrics(absent, absent, absent, absent)
            return flat_logs(logs)
        except Exception:  # without a batch, anything may be raised
            self._looks_at_batch = True
            return {}


def _parts(result: Any) -> Mapping[str | None, Any]:
    """Return the numbers of a metric's result by name; a single number has the name None."""
    return dict(flat_logs(result).items()) if isinstance(result, Mapping) else {None: result}


def _names_in(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names in nested logs; empty in place of a number."""
    return {name: _names_in(value) if isinstance(value, Mapping) else {} for name, value in logs.items()}


def _nested(form: Mapping[str, Any], logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _nested(inner, logs) if inner else logs[name] for name, inner in form.items()}


class _Absent:
    """A placeholder for a batch that must not be read."""


def metrics_of(model: Any) -> list[Any]:
    """Return all metrics of the model, including the container of compiled metrics, which `model.metrics` omits."""
    found = {id(metric): metric for metric in [*model.metrics, *model._metrics, model._compile_metrics] if metric}
    return list(found.values())


def _is_named_so(origin: _Origin, name: str) -> bool:
    """Whether Keras itself logs this result under this name."""
    return origin.metric is not None and name == (origin.metric.name if origin.key is None else origin.key)


def _noting(note: Callable[[Any, Any], Any], metric: Any, result: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: note(metric, result())


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
