"""How the variables of a model's metrics are merged over the replicas: by what was added to them, and the start once.

A step changes a variable from s to U(s, batch); each rank knows U(s, its part). A rule says two things of U:

* the *weight*: how U of the whole batch follows from U of its parts. A counter is a sum of its parts, a mean of one
  number for each step is their mean by shares, a maximum their maximum;
* whether it is *additive*, U(s, batch) = s + f(batch). Then f(batch) is what is merged, and s is added afterwards,
  once: s may be anything, whether a metric starts with it or keeps it from one epoch to the next.
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

# What the `aggregation` of a variable says. A plain `keras.Variable` says "none", and counts like most others.
RULE_OF_AGGREGATION = {
    "sum": COUNTER,
    "none": COUNTER,
    "mean": MetricRule(MergeWeight.SHARE, False),
    "only_first_replica": MetricRule(MergeWeight.FIRST, False),
}


def declared_rule(variable: Any) -> MetricRule:
    """The rule that a variable declares; flags, which cannot be added, are raised."""
    if variable.dtype == "bool":
        return MetricRule(MergeWeight.MAX, False)
    return RULE_OF_AGGREGATION[variable.aggregation]


class MetricRules:
    """The rules of `model.metrics_variables`, in order, and the variables' values.

    Args:
        read: returns copies of the newest values of variables.
        write: gives variables values.

    Attributes:
        variables: the variables that they are of.
        rules: what the variables declare, until `decided` says what they do.
        is_decided: whether it has been found out what they do.
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

    def note(self, variables: Sequence[Any]) -> None:
        """Call when the model is built, perhaps again: what was decided on the same variables stays."""
        # By identity: what was found out holds as long as the model has these very variables, also if it is built
        # again.
        if [id(variable) for variable in variables] != [id(variable) for variable in self.variables]:
            self.variables = list(variables)
            self.rules = tuple(declared_rule(variable) for variable in variables)
            self.is_decided = False

    def values(self) -> list[Array]:
        """Copies of the variables' newest values."""
        return self._read(self.variables)

    def set_values(self, values: Sequence[Array]) -> None:
        """Give the variables these values."""
        self._write(self.variables, values)

    def decide(self, rules: Sequence[MetricRule]) -> None:
        """Set the rules that were found for the variables."""
        self.rules = tuple(rules)
        self.is_decided = True

    @property
    def weights(self) -> tuple[MergeWeight, ...]:
        """How each variable counts in the merge."""
        return tuple(rule.weight for rule in self.rules)

    @property
    def weights_over_steps(self) -> tuple[MergeWeight, ...]:
        """How each counts in a merge of whole steps that different workers took: what is added, is added up."""
        return tuple(MergeWeight.ONE if rule.is_additive else rule.weight for rule in self.rules)

    @property
    def only_count(self) -> bool:
        """Whether all are counters, so that what several steps have added can be merged at once."""
        return set(self.rules) <= {COUNTER}

    @property
    def merge_every_batch(self) -> bool:
        """Whether what several batches did to them cannot be merged at once, as each batch has shares of its own."""
        # Counters may wait, whatever the shares; so may maxima and minima that are not added to what was before. The
        # rest depends on each batch's shares.
        return any(rule != COUNTER and (rule.is_additive or rule.weight not in EXTREMES) for rule in self.rules)

    def added(self, values: Sequence[Array], start: Sequence[Array]) -> list[Array]:
        """The part of `values` to merge: increments since `start` for additive rules, else the values."""
        return [
            np.asarray(value - begun) if rule.is_additive else value
            for value, begun, rule in zip(values, start, self.rules, strict=True)
        ]

    def with_start(self, merged: Sequence[Array], start: Sequence[Array]) -> list[Array]:
        """The values of which this was merged; see `added`."""
        return [
            np.asarray(begun + value, begun.dtype) if rule.is_additive else value
            for value, begun, rule in zip(merged, start, self.rules, strict=True)
        ]
