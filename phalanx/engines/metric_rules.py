"""Rules for merging the variables of metrics over the replicas: increments are merged, and the start counts once.

A step changes a variable from s to U(s, batch). Each rank knows U(s, its part). A rule describes U in two ways:

* The *weight*: how U of the whole batch follows from U of its parts. A counter is the sum of its parts, a mean of one
  number per step is their mean weighted by shares, a maximum is their maximum.
* Whether it is *additive*, U(s, batch) = s + f(batch). Then f(batch) is merged, and s is added afterwards, once. s may
  be anything, whether a metric starts with it or keeps it from one epoch to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.engines.step_layout import EXTREMES, MergeWeight

Array = np.ndarray[Any, Any]


class MetricRule(NamedTuple):
    """See the top of this file."""

    weight: MergeWeight
    is_additive: bool


COUNTER = MetricRule(MergeWeight.ONE, True)

# Rules for the `aggregation` of a variable. A plain `keras.Variable` has "none", and counts like most others.
RULE_OF_AGGREGATION = {
    "sum": COUNTER,
    "none": COUNTER,
    "mean": MetricRule(MergeWeight.SHARE, False),
    "only_first_replica": MetricRule(MergeWeight.FIRST, False),
}


def declared_rule(variable: Any) -> MetricRule:
    """Return the rule that a variable declares. Flags cannot be added; they are merged by maximum."""
    if variable.dtype == "bool":
        return MetricRule(MergeWeight.MAX, False)
    return RULE_OF_AGGREGATION[variable.aggregation]


class MetricRules:
    """The rules of `model.metrics_variables`, in order, and the variables' values.

    Args:
        read: Returns copies of the newest values of variables.
        write: Assigns values to variables.

    Attributes:
        variables: The variables of the metrics.
        rules: Rules that the variables declare, until `decide` sets those that they follow.
        is_decided: Whether `decide` was called for these variables.
    """

    def __init__(
        self,
        read: Callable[[Sequence[Any]], list[Array]],
        write: Callable[[Sequence[Any], Sequence[Array]], None],
    ) -> None:
        self._read, self._write = read, write
        self.variables: list[Any] = []
        self.rules: tuple[MetricRule, ...] = ()
        self.is_decided = False

    def set_variables(self, variables: Sequence[Any]) -> None:
        """Set the variables, whenever the model is built. What was decided for the same variables is kept."""
        # By identity: rules that were found hold as long as the model has these very variables, even if it is rebuilt.
        if [id(variable) for variable in variables] != [id(variable) for variable in self.variables]:
            self.variables = list(variables)
            self.rules = tuple(declared_rule(variable) for variable in variables)
            self.is_decided = False

    def values(self) -> list[Array]:
        """Return copies of the variables' newest values."""
        return self._read(self.variables)

    def set_values(self, values: Sequence[Array]) -> None:
        """Assign values to the variables."""
        self._write(self.variables, values)

    def decide(self, rules: Sequence[MetricRule]) -> None:
        """Set the rules that were found for the variables."""
        self.rules = tuple(rules)
        self.is_decided = True

    @property
    def weights(self) -> tuple[MergeWeight, ...]:
        """Weight of each variable in the merge."""
        return tuple(rule.weight for rule in self.rules)

    @property
    def weights_over_steps(self) -> tuple[MergeWeight, ...]:
        """Weight of each variable in a merge of whole steps of different workers: additive ones are summed."""
        return tuple(MergeWeight.ONE if rule.is_additive else rule.weight for rule in self.rules)

    @property
    def only_count(self) -> bool:
        """Whether all variables are counters, so that the increments of several steps can be merged at once."""
        return set(self.rules) <= {COUNTER}

    @property
    def merge_every_batch(self) -> bool:
        """Whether the changes of several batches cannot be merged at once, because each batch has its own shares."""
        # Counters may wait, whatever the shares, and so may maxima and minima that are not added to a former value. All
        # others depend on each batch's shares.
        return any(rule != COUNTER and (rule.is_additive or rule.weight not in EXTREMES) for rule in self.rules)

    def increments(self, values: Sequence[Array], start: Sequence[Array]) -> list[Array]:
        """Return the part of `values` to merge: increments since `start` for additive rules, else the values."""
        return [
            np.asarray(value - begun) if rule.is_additive else value
            for value, begun, rule in zip(values, start, self.rules, strict=True)
        ]

    def add_start(self, merged: Sequence[Array], start: Sequence[Array]) -> list[Array]:
        """Return the values from merged parts; the inverse of `increments`."""
        return [
            np.asarray(begun + value, begun.dtype) if rule.is_additive else value
            for value, begun, rule in zip(merged, start, self.rules, strict=True)
        ]
