"""The logs of a step: results of metrics whose state was merged, and means of the replicas' own logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.keras_compat.model_state import flat_logs
from phalanx.keras_compat.observation.log_origins import LogOrigins


def metrics_without_updates(model: Any, merged: Sequence[Any]) -> frozenset[str]:
    """Return the names of the metrics that a step did not update: a log of the same name is not their result."""
    # A metric that has counted has at least one nonzero variable, if only its count.
    # Not strict: a metric built by the step itself was not merged.
    touched = {id(v) for v, value in zip(model.metrics_variables, merged, strict=False) if np.any(value)}
    # Of several metrics with one name, Keras logs the last one's result: a program's `Mean("loss")` follows Keras's.
    is_silent = {m.name: not any(id(v) in touched for v in m.variables) for m in model.metrics}
    return frozenset(name for name, silent in is_silent.items() if silent)


def metrics_never_updated(before: frozenset[str] | None, model: Any, merged: Sequence[Any]) -> frozenset[str]:
    """Return the names of the metrics that no step has updated so far.

    Args:
        before: The previous result; None at the first step.
        model: A compiled model.
        merged: The state of its metrics after this step.
    """
    if before is not None and not before:
        return before
    # The set only shrinks: a metric may have nothing to count in one batch, and its log is still its result.
    now = metrics_without_updates(model, merged)
    return now if before is None else before & now


def scale_last_logs(values: Sequence[Any], last: float, share: float) -> list[Any]:
    """Scale the last batch's own logs of a rank, as float32, so that merging them by `share` counts them by `last`.

    Args:
        values: Scalars.
        last: This rank's share of the last global batch; 0 if it had a placeholder batch.
        share: This rank's share of all batches.
    """
    if not last:
        return [np.zeros((), np.float32) for _ in values]
    # The merge multiplies by `share`, and these should count by `last`.
    return [np.asarray(value, np.float32) * np.float32(last / share) for value in values]


def choose_logs(
    averages: Mapping[str, Any],
    results: Callable[[], Mapping[str, Any]],
    silent: frozenset[str],
    origins: LogOrigins,
    derived: Callable[[], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the logs of a step: metric results where there are any, else the mean of the ranks' logs.

    Args:
        averages: The means of everything that the step logged itself; empty if it logs only metric results.
        results: Returns the results of the metrics by name.
        silent: Names of the metrics that the step did not update.
        origins: The origins of the step's logs.
        derived: Returns logs that follow from the metrics under other names; None: `origins` does.
    """
    if not averages:
        return dict(results())
    merged = flat_logs(results())
    # If a step logs all names and no others, Keras takes the results, regardless of the logged values.
    known = (
        set(merged) if averages.keys() == merged.keys() else {n for n in merged if origins.may_be_result(n, averages)}
    )
    chosen = {name: merged[name] if name in known - silent else value for name, value in averages.items()}
    return origins.nested({**chosen, **(origins.results(averages) if derived is None else derived())})
