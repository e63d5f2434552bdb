"""Searches for the cheapest of a few plans by trying them in a noisy environment. Pure: costs come in, plans go out.

Theory
------
The search starts with the default plan and refines it one dimension at a time. A *round* tries several plans in turn,
several times, forward and backward, so that a drift affects all of them equally; the first pass does not count. The
plan with the lowest median starts the next round. The last round compares the best plan with the default again, and the
default stays unless the other plan is better by more than a margin and the scatter of the costs. The choice is thus
never worse than the default by more than noise, whatever happened in earlier rounds.

When several ranks search together, they merge their costs at the end of each round, so all make the same decision.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")

MergeCosts = Callable[[Sequence[float]], Sequence[float]]
"""Exchanges a round's costs between the ranks; returns the same costs on every rank."""

REPEATS = 5
"""Measurements of each plan in a round: the median of five tolerates two disturbed ones."""
FINAL_REPEATS = 10
"""Measurements in the last round, which decides."""
MARGIN = 0.03
"""Relative gain below which the default, the best tested plan, stays."""
SIGMAS = 3.0
"""Gain, in standard errors, below which the default stays."""
_MAD_TO_SIGMA = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""
_MEDIAN_ERROR = 1.2533
"""Ratio of the standard errors of the median and the mean of a normal distribution."""


class TrialResult(NamedTuple, Generic[P]):
    """A plan and the median of its costs in one round."""

    plan: P
    cost: float


class TrialSearch(Generic[P]):
    """A search for the plan with the lowest cost.

    Use `plan`, measure what it costs, `record` the cost, and repeat until `choice` is set.

    Args:
        default: Plan to keep if no other is better.
        refinements: Functions that take the best plan so far and return the plans to compare with it, one function per
            round.
        repeats: Measurements of each plan in a round.
        final_repeats: Measurements of each plan in the last round.

    Attributes:
        results: Every comparison so far, in order.
        choice: Plan to keep; None while the search runs.
    """

    def __init__(
        self,
        default: P,
        refinements: Sequence[Callable[[P], Sequence[P]]],
        *,
        repeats: int = REPEATS,
        final_repeats: int = FINAL_REPEATS,
    ):
        self.results: list[TrialResult[P]] = []
        self.choice: P | None = None
        self._default = self._best = default
        self._refinements = list(refinements)
        self._repeats = repeats
        self._final_repeats = final_repeats
        self._is_final = False
        self._begin_next_round()

    @property
    def plan(self) -> P:
        """The plan to use now."""
        return self._plans[self._order[len(self._costs)]] if self.choice is None else self.choice

    def record(self, cost: float, merge_costs: MergeCosts) -> None:
        """Add a measurement of `plan`. The last one of a round ends the round; every rank then calls `merge_costs`."""
        self._costs.append(cost)
        if len(self._costs) == len(self._order):
            self._end_round(merge_costs(self._costs))

    def _end_round(self, costs: Sequence[float]) -> None:
        first = len(self._plans)  # the first pass does not count
        by_plan: list[list[float]] = [[] for _ in self._plans]
        for number, cost in zip(self._order[first:], costs[first:], strict=True):
            by_plan[number].append(cost)
        medians = [statistics.median(each) for each in by_plan]
        self.results += map(TrialResult, self._plans, medians)
        if self._is_final:
            default, other = by_plan
            self.choice = self._plans[1] if is_better(other, default) else self._default
            return
        self._best = self._plans[medians.index(min(medians))]
        self._begin_next_round()

    def _begin_next_round(self) -> None:
        while self._refinements:
            plans = [self._best, *(plan for plan in self._refinements.pop(0)(self._best) if plan != self._best)]
            if len(plans) > 1:
                self._begin_round(plans, self._repeats)
                return
        if self._best == self._default:
            self.choice = self._default
            return
        self._is_final = True
        self._begin_round([self._default, self._best], self._final_repeats)

    def _begin_round(self, plans: Sequence[P], repeats: int) -> None:
        self._plans = plans
        self._costs: list[float] = []
        forwards = list(range(len(plans)))
        passes = [forwards if number % 2 == 0 else forwards[::-1] for number in range(1 + repeats)]
        self._order = [number for each in passes for number in each]


def is_better(costs: Sequence[float], than: Sequence[float]) -> bool:
    """Whether the median of `costs` is lower than that of `than` by more than the margin and the scatter of both."""
    gain = statistics.median(than) - statistics.median(costs)
    error = math.hypot(_error_of_median(costs), _error_of_median(than))
    return gain > max(MARGIN * statistics.median(than), SIGMAS * error)


def _error_of_median(costs: Sequence[float]) -> float:
    middle = statistics.median(costs)
    deviation = statistics.median(abs(cost - middle) for cost in costs)
    return _MEDIAN_ERROR * _MAD_TO_SIGMA * deviation / math.sqrt(len(costs))
