"""Changes that functions make on a worker in addition to the variables that servers train: metrics, state of layers.

A worker counts each function's metrics from their initial state. The coordinator adds the counts, once for each
function, however often it was run. The state of layers (moving averages of batch normalization) is separate on each
worker; the coordinator uses that of the function that finished last.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from phalanx.engines.metric_rules import declared_rule
from phalanx.keras_compat.variables.host_values import host_copy, to_host
from phalanx.training.scope_registry import ScopedName, ScopeRegistry

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
VariableKey = tuple[ScopedName, int]
"""An object created in scope, and the index of one of its variables."""


class FunctionEffects(NamedTuple):
    """Changes made by one function.

    Attributes:
        increments: Increments to add to metrics.
        new_values: New values, of layers and of metrics that are not sums.
    """

    increments: dict[VariableKey, Array]
    new_values: dict[VariableKey, Array]


def _metric_variables(scope_registry: ScopeRegistry) -> Iterator[tuple[VariableKey, Any, Any]]:
    """Each variable of the metrics once, although a metric may contain others: its key, itself, its metric."""
    seen: set[int] = set()
    for name, metric in scope_registry.metrics():
        for index, variable in enumerate(metric.variables):
            if id(variable) not in seen:
                seen.add(id(variable))
                yield (name, index), variable, metric


def _layer_variables(scope_registry: ScopeRegistry) -> dict[VariableKey, Any]:
    """The untrained state of layers, except that of random generators, which is separate on each worker."""
    return {
        (name, index): variable
        for name, layer in scope_registry.layers()
        for index, variable in enumerate(layer._non_trainable_variables)
        if all(variable is not generator.state for generator in layer._seed_generators)
    }


def _weights(scope_registry: ScopeRegistry) -> dict[VariableKey, Any]:
    """The weights of layers, frozen or not."""
    return {
        (name, -1 - index): variable
        for name, layer in scope_registry.layers()
        for index, variable in enumerate(layer._trainable_variables)
    }


def layer_state(scope_registry: ScopeRegistry) -> dict[VariableKey, Array]:
    """The current values of the layers' state."""
    return _values(_layer_variables(scope_registry))


def untrained_values(scope_registry: ScopeRegistry, trained: Iterable[Any]) -> dict[VariableKey, Array]:
    """The current values of layers that servers do not train: frozen weights, and those of models that the optimizer
    was not built with. Only the coordinator's program changes them.

    Args:
        trained: Variables that servers train.
    """
    on_servers = {id(variable) for variable in trained}
    kept = {key: weight for key, weight in _weights(scope_registry).items() if id(weight) not in on_servers}
    return _values(kept | _layer_variables(scope_registry))


def set_untrained_values(scope_registry: ScopeRegistry, values: Mapping[VariableKey, Array]) -> None:
    """Set the layers' values to those from another task."""
    for key, variable in (_weights(scope_registry) | _layer_variables(scope_registry)).items():
        if key in values:
            variable.assign(values[key])


def _values(variables: Mapping[VariableKey, Any]) -> dict[VariableKey, Array]:
    return {key: host_copy(variable) for key, variable in variables.items()}


class EffectRecorder:
    """Records the changes of the running function, on a worker."""

    def __init__(self, scope_registry: ScopeRegistry) -> None:
        self._scope_registry = scope_registry
        self._initial: dict[VariableKey, Array] = {}  # variables of each metric after `reset_state`
        self._touched: dict[int, Any] = {}  # metrics that the last function changed, by id: only these are reset
        self._state: dict[VariableKey, Array] = {}  # of layers, when the function began
        self._collected = True

    def start(self) -> None:
        """Begin recording a function."""
        if not self._collected:  # the last one has failed
            self._touched = {id(metric): metric for _, metric in self._scope_registry.metrics()}
        for metric in self._touched.values():
            metric.reset_state()
        self._touched.clear()
        self._collected = False
        for key, variable, metric in _metric_variables(self._scope_registry):
            if key not in self._initial:
                metric.reset_state()
                self._initial[key] = host_copy(variable)
        self._state = layer_state(self._scope_registry)

    def collect(self) -> FunctionEffects:
        """The function's changes."""
        self._collected = True
        changes = FunctionEffects({}, {})
        for key, variable, metric in _metric_variables(self._scope_registry):
            value, initial = to_host(variable), self._initial.get(key)
            if initial is None:  # the function has built the metric
                initial = self._initial[key] = np.zeros_like(value)
            if np.array_equal(value, initial):
                continue
            self._touched[id(metric)] = metric
            if declared_rule(variable).is_additive:
                changes.increments[key] = value - initial
            else:
                changes.new_values[key] = np.array(value)
        for key, value in layer_state(self._scope_registry).items():
            if not np.array_equal(value, self._state.get(key, ())):
                changes.new_values[key] = value
        return changes


class EffectAccumulator:
    """Accumulates functions' changes that are not in the variables yet, at the coordinator. One thread at a time."""

    def __init__(self, scope_registry: ScopeRegistry) -> None:
        self._scope_registry = scope_registry
        self._sum = FunctionEffects({}, {})
        self._unknown: set[ScopedName] = set()  # metrics that a warning has named

    def add(self, changes: FunctionEffects) -> None:
        for key, increment in changes.increments.items():
            before = self._sum.increments.get(key)
            self._sum.increments[key] = increment if before is None else before + increment
        self._sum.new_values.update(changes.new_values)

    def apply(self) -> None:
        """Put the changes into the variables of this task."""
        (increments, new_values), self._sum = self._sum, FunctionEffects({}, {})
        variables = {key: variable for key, variable, _ in _metric_variables(self._scope_registry)}
        for key, increment in increments.items():
            if key in variables:
                variables[key].assign(to_host(variables[key]) + increment)
            elif key[0] not in self._unknown:
                self._unknown.add(key[0])
                logger.warning(
                    "What workers counted in metric %s is ignored: the chief's metric has no such variable. Build it "
                    "before.",
                    key[0],
                )
        variables |= _layer_variables(self._scope_registry)
        for key, value in new_values.items():
            if key in variables:
                variables[key].assign(value)
