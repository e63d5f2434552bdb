"""What the TensorFlow and PyTorch engines share: which variables of a model a step merges, and what it logs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
from keras import StatelessScope
from keras.src.trainers.trainer import Trainer

from phalanx.arrays.tree import leaves
from phalanx.data.elements import ElementStructure
from phalanx.engines.step_layout import WEIGHT_OF_AGGREGATION, MergeWeight
from phalanx.errors import UnsupportedError

_GradientMerge = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Gets gradients and their weights."""

_strays = threading.local()


def optimizers(model: Any) -> list[Any]:
    """The optimizer that the model was compiled with, and those that it, or models inside it, keep for a `train_step`
    of its own."""
    found = {id(model.optimizer): model.optimizer} if getattr(model, "optimizer", None) is not None else {}
    for value in vars(model).values():
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        found |= {id(part): part for part in parts if isinstance(part, keras.optimizers.Optimizer)}
    if type(model).train_step is not keras.Model.train_step:
        inside = [getattr(layer, "optimizer", None) for layer in model._flatten_layers(include_self=False)]
        found |= {id(part): part for part in inside if isinstance(part, keras.optimizers.Optimizer)}
    return list(found.values())


@contextmanager
def merging_applies(
    model: Any,
    merge: _GradientMerge,
    fused: Callable[[Any], AbstractContextManager[None]],
    assign: Callable[[Sequence[Any], Sequence[Any]], None] | None = None,
) -> Iterator[None]:
    """Let optimizers merge their gradients first; for train steps that call them themselves.

    Those of the model are known; others, such as one in a global variable, ask `stray_merge` as they are applied.

    Args:
        merge: gets the gradients and their weights.
        fused: lets an optimizer use the backend's own kernels.
        assign: instead of the optimizers' own update, gets what `merge` returned and the weights.
    """
    with ExitStack() as stack:
        for optimizer in optimizers(model):
            stack.enter_context(_merging_apply(optimizer, merge, assign or optimizer.apply))
            stack.enter_context(fused(optimizer))
        stack.enter_context(_strays_merging(_refuse_stray if assign else merge))
        yield


def stray_merge() -> _GradientMerge | None:
    """What an optimizer that is applied now, and is none of the model's, is to merge its gradients with."""
    return getattr(_strays, "merge", None)


@contextmanager
def _strays_merging(merge: _GradientMerge | None) -> Iterator[None]:
    before = stray_merge()
    _strays.merge = merge
    try:
        yield
    finally:
        _strays.merge = before


def _refuse_stray(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    raise UnsupportedError(
        "train_step applies an optimizer that is not the model's. With parameter servers the servers update, so pass "
        "it to compile()."
    )


@contextmanager
def _merging_apply(optimizer: Any, merge: _GradientMerge, apply: Callable[..., Any]) -> Iterator[None]:
    def merged_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        if trainable_variables is None:
            trainable_variables = optimizer._trainable_variables
        weights = list(trainable_variables)
        merged = merge(list(grads), weights)
        with _strays_merging(None):
            return apply(merged, weights)

    vars(optimizer)["apply"] = merged_apply
    try:
        yield
    finally:
        del vars(optimizer)["apply"]


def layer_state(model: Any) -> list[Any]:
    """The floating variables that layers change while they compute (batch-norm statistics).

    Frozen weights are not among them: a layer keeps what it trains apart from its state, whatever
    `trainable` says.
    """
    seen: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for variable in layer._non_trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype):
                seen.setdefault(id(variable), variable)
    return list(seen.values())


def check_layers(model: Any) -> None:
    """Raise UnsupportedError for what layers keep that would have to be summed over the replicas."""
    for layer in model._flatten_layers():
        for variable in layer._non_trainable_variables:
            if variable.aggregation == "sum":
                raise UnsupportedError(
                    f"{variable.path!r} was made with aggregation='sum'. What layers keep is averaged over the "
                    f"replicas. Keep a mean (over the samples of a batch), or count in a metric of the layer's, whose "
                    f"variables are summed."
                )


class Packing(ABC):
    """A batch as Keras gives it to steps of a model's own: without what is not there, as in `x, y = data`."""

    _form = ElementStructure.PARTS

    def expect(self, form: ElementStructure) -> None:
        """See `Engine.expect`."""
        if form is not self._form:
            self._form = form
            self.retrace()

    @abstractmethod
    def retrace(self) -> None:
        """See `Engine.retrace`."""

    def _packed(self, data: tuple[Any, Any, Any], form: ElementStructure | None = None) -> Any:
        match form or self._form:
            case ElementStructure.PARTS:
                return keras.utils.pack_x_y_sample_weight(*data)
            case ElementStructure.ALONE:
                return (data[0],)
            case ElementStructure.WHOLE:
                return data[0]

    def _as_given(self, data: tuple[Any, Any, Any]) -> Any:
        """For Keras's own methods, which take such a tuple apart, or say that they cannot."""
        return data[0] if self._form is ElementStructure.WHOLE else data


def samples(data: Any) -> int:
    """How many there are in a batch."""
    return int(leaves(data)[0].shape[0])


def is_unbuilt(model: Any) -> bool:
    """Whether the model, its loss or its metrics wait for a first batch to create their variables."""
    parts = [model._compile_metrics, model._compile_loss]
    layers = model._flatten_layers()
    return not all(layer.built for layer in layers) or any(part is not None and not part.built for part in parts)


def has_built_parts(model: Any) -> bool:
    """Whether all that the model is made of has its variables, be it itself built or not."""
    metrics = model._compile_metrics
    if metrics is not None and not leaves([metrics._user_metrics or (), metrics._user_weighted_metrics or ()]):
        metrics = None  # there is nothing to build
    parts = [metrics, model._compile_loss]
    layers = [layer for layer in model._flatten_layers() if layer is not model]
    return bool(layers) and all(part is None or part.built for part in [*layers, *parts])


def metric_weights(model: Any) -> tuple[MergeWeight, ...]:
    """How each of `model.metrics_variables` counts in the sum over ranks."""
    return tuple(WEIGHT_OF_AGGREGATION[variable.aggregation] for variable in model.metrics_variables)


def results_of(model: Any, metrics: Sequence[Any]) -> dict[str, Any]:
    """The results of the metrics, if `model.metrics_variables` had these values."""
    values = [keras.ops.convert_to_tensor(value) for value in metrics]
    with StatelessScope(state_mapping=list(zip(model.metrics_variables, values, strict=True))):
        return dict(model.get_metrics_result())


def only_counts(model: Any, trainer: type) -> bool:
    """Whether the metrics of a training step are sums, of which it logs nothing but the results."""
    return set(metric_weights(model)) <= {MergeWeight.ONE} and not logs_differ_from_metrics(
        model, trainer, "train_step"
    )


def overrides(model: Any, trainer: type, method: str) -> bool:
    """Whether the model's class has its own `method` instead of the trainer's."""
    return getattr(type(model), method) is not getattr(trainer, method)


def logs_differ_from_metrics(model: Any, trainer: type, step: str) -> bool:
    """Whether a step may log more than the results of the metrics."""
    return overrides(model, trainer, step) or overrides(model, Trainer, "compute_metrics")


def update_metrics(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, Any]:
    """Add a batch to the metrics; returns what the model itself logs about it.

    Keras's own `compute_metrics` also forms the results, which only the merged state will have.
    """
    if overrides(model, Trainer, "compute_metrics"):
        return flat_logs(model.compute_metrics(x, y, y_pred, sample_weight))
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(y, y_pred, sample_weight)
    return {}


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Logs as Keras shows them: those of a nested dictionary stand beside the others."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= flat_logs(value) if isinstance(value, Mapping) else {name: value}
    return flat


def silent_metrics(model: Any, merged: Sequence[Any]) -> frozenset[str]:
    """The metrics that a step left alone: a log of the same name is not theirs."""
    touched = {id(v) for v, value in zip(model.metrics_variables, merged, strict=True) if np.any(value)}
    return frozenset(m.name for m in model.metrics if not any(id(v) in touched for v in m.variables))


def still_silent(before: frozenset[str] | None, model: Any, merged: Sequence[Any]) -> frozenset[str]:
    """The metrics that every step until now left alone; `before` are those until the last one, None at the first."""
    if before is not None and not before:
        return before
    now = silent_metrics(model, merged)
    return now if before is None else before & now


def weigh_last(values: Sequence[Any], last: float, share: float) -> list[Any]:
    """What a rank logged of the last batch, to be merged by its `share` of all batches and to count by that of the
    `last` one: numbers in float32."""
    if not last:
        return [np.zeros((), np.float32) for _ in values]  # of a stand-in, for a batch of which it had nothing
    return [np.asarray(value, np.float32) * np.float32(last / share) for value in values]


def choose_logs(
    averages: Mapping[str, Any],
    results: Callable[[], Mapping[str, Any]],
    silent: frozenset[str],
    derived: Callable[[], Mapping[str, Any]] = dict,
) -> dict[str, Any]:
    """Metric results where there are any, else the mean of what the ranks logged.

    Args:
        averages: that mean, of all that the step logged itself; empty where it only logs metric results.
        results: of the metrics, by their names.
        derived: what else follows from the metrics; see `LogOrigins.results`.
    """
    merged = dict(results())
    if not averages:
        return merged
    chosen = {name: merged[name] if name in merged and name not in silent else v for name, v in averages.items()}
    return {**chosen, **derived()}
