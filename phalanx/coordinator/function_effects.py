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
Place = tuple[ScopedName, int]
"""An object created in scope, and the index of one of its variables."""


class FunctionEffects(NamedTuple):
    """Changes made by one function.

    Attributes:
        counted: Increments to add to metrics.
        replaced: New values, of layers and of metrics that are not sums.
    """

    counted: dict[Place, Array]
    replaced: dict[Place, Array]


def _metric_variables(scope_registry: ScopeRegistry) -> Iterator[tuple[Place, Any, Any]]:
    """Each variable of the metrics once, although a metric may contain others: its place, itself, its metric."""
    seen: set[int] = set()
    for name, metric in scope_registry.metrics():
        for index, variable in enumerate(metric.variables):
            if id(variable) not in seen:
                seen.add(id(variable))
                yield (name, index), variable, metric


def _layer_variables(scope_registry: ScopeRegistry) -> dict[Place, Any]:
    """The untrained state of layers, except that of random generators, which is separate on each worker."""
    return {
        (name, index): variable
        for name, layer in scope_registry.layers()
        for index, variable in enumerate(layer._non_trainable_variables)
        if all(variable is not generator.state for generator in layer._seed_generators)
    }


def _weights(scope_registry: ScopeRegistry) -> dict[Place, Any]:
    """The weights of layers, frozen or not."""
    return {
        (name, -1 - index): variable
        for name, layer in scope_registry.layers()
        for index, variable in enumerate(layer._trainable_variables)
    }


def layer_state(scope_registry: ScopeRegistry) -> dict[Place, Array]:
    """The current values of the layers' state."""
    return _values(_layer_variables(scope_registry))


def untrained(scope_registry: ScopeRegistry, trained: Iterable[Any]) -> dict[Place, Array]:
    """The current values of layers that servers do not train: frozen weights, and those of models that the optimizer
    was not built with. Only the coordinator's program changes them.

    Args:
        trained: Variables that servers train.
    """
    on_servers = {id(variable) for variable in trained}
    kept = {place: weight for place, weight in _weights(scope_registry).items() if id(weight) not in on_servers}
    return _values(kept | _layer_variables(scope_registry))


def set_untrained(scope_registry: ScopeRegistry, values: Mapping[Place, Array]) -> None:
    """Set the layers' values to those from another task."""
    for place, variable in (_weights(scope_registry) | _layer_variables(scope_registry)).items():
        if place in values:
            variable.assign(values[place])


def _values(variables: Mapping[Place, Any]) -> dict[Place, Array]:
    return {place: host_copy(variable) for place, variable in variables.items()}


class EffectRecorder:
    """Records the changes of the running function, on a worker."""

    def __init__(self, scope_registry: ScopeRegistry) -> None:
        self._scope_registry = scope_registry
        self._initial: dict[Place, Array] = {}  # variables of each metric after `reset_state`
        self._touched: dict[int, Any] = {}  # metrics that the last function changed, by id: only these are reset
        self._state: dict[Place, Array] = {}  # of layers, when the function began
        self._collected = True

    def start(self) -> None:
        """Begin recording a function."""
        if not self._collected:  # the last one has failed
            self._touched = {id(metric): metric for _, metric in self._scope_registry.metrics()}
        for metric in self._touched.values():
            metric.reset_state()
        self._touched.clear()
        self._collected = False
        for place, variable, metric in _metric_variables(self._scope_registry):
            if place not in self._initial:
                metric.reset_state()
                self._initial[place] = host_copy(variable)
        self._state = layer_state(self._scope_registry)

    def collect(self) -> FunctionEffects:
        """The function's changes."""
        self._collected = True
        changes = FunctionEffects({}, {})
        for place, variable, metric in _metric_variables(self._scope_registry):
            value, initial = to_host(variable), self._initial.get(place)
            if initial is None:  # the function has built the metric
                initial = self._initial[place] = np.zeros_like(value)
            if np.array_equal(value, initial):
                continue
            self._touched[id(metric)] = metric
            if declared_rule(variable).is_additive:
                changes.counted[place] = value - initial
            else:
                changes.replaced[place] = np.array(value)
        for place, value in layer_state(self._scope_registry).items():
            if not np.array_equal(value, self._state.get(place, ())):
                changes.replaced[place] = value
        return changes


class EffectAccumulator:
    """Accumulates functions' changes that are not in the variables yet, at the coordinator. One thread at a time."""

    def __init__(self, scope_registry: ScopeRegistry) -> None:
        self._scope_registry = scope_registry
        self._sum = FunctionEffects({}, {})
        self._unknown: set[ScopedName] = set()  # metrics that a warning has named

    def add(self, changes: FunctionEffects) -> None:
        for place, counted in changes.counted.items():
            before = self._sum.counted.get(place)
            self._sum.counted[place] = counted if before is None else before + counted
        self._sum.replaced.update(changes.replaced)

    def settle(self) -> None:
        """Put the changes into the variables of this task."""
        (counted, replaced), self._sum = self._sum, FunctionEffects({}, {})
        variables = {place: variable for place, variable, _ in _metric_variables(self._scope_registry)}
        for place, increment in counted.items():
            if place in variables:
                variables[place].assign(to_host(variables[place]) + increment)
            elif place[0] not in self._unknown:
                self._unknown.add(place[0])
                logger.warning(
                    "What workers counted in metric %s is ignored: the chief's metric has no such variable. Build it "
                    "before.",
                    place[0],
                )
        variables |= _layer_variables(self._scope_registry)
        for place, value in replaced.items():
            if place in variables:
                variables[place].assign(value)
