"""Known properties of Keras's metrics: whether their variables are sums over the samples of a batch.

Uses `CompileMetrics.metrics`, `MeanMetricWrapper._fn` and `_fn_kwargs`. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from typing import Any

import keras

from phalanx.keras_compat.global_batch.global_losses import couples_last_axis

_HOME = "keras.src.metrics."


def compiled_metrics(model: Any) -> list[Any]:
    """Return the metrics that the model was compiled with; empty until they are built."""
    compiled = getattr(model, "_compile_metrics", None)
    return [] if compiled is None else list(compiled.metrics)


def needs_class_axis(metric: Any) -> bool:
    """Whether a metric is a Keras metric that relates the values along the last axis to each other."""
    return type(metric).__module__.startswith(_HOME) and couples_last_axis(getattr(metric, "_fn", None))


def counts_samples(metric: Any) -> bool:
    """Whether a metric is a Keras metric whose variables are sums over the samples."""
    kind = type(metric)
    if not kind.__module__.startswith(_HOME) or kind is keras.metrics.MeanMetricWrapper:
        return False
    # One value per sample, unless it is computed along the axis of the samples.
    return getattr(metric, "_fn_kwargs", {}).get("axis", -1) == -1 and all(
        variable.aggregation == "sum" for variable in metric.variables
    )
