"""Finding the best of a few ways by trying them, in spite of noise. Pure: costs come in, trials go out.

Theory
------
The search begins with the default and refines it, one dimension after the other. A *round* tries some plans in turn,
several times, forwards and backwards, so that what drifts meanwhile drifts for all of them; the first time does not
count. Its best one, by the median, is where the next round begins. The last round compares what was found with the
default once more, and the default stays unless the other is better by more than both a margin and what the costs
scatter. So what is chosen is not worse than the default by more than noise, however the rounds before went.

Where several ranks search together, each brings its costs to `advance` only after they have been merged: then all take
the same decisions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")

REPEATS = 5
"""Measurements of each plan in a round: a median of five bears two that something got in the way of."""
FINAL_REPEATS = 10
"""In the last round, which decides."""
MARGIN = 0.03
"""What a plan has to be better by: less is not worth to differ from what is tested most."""
SIGMAS = 3.0
"""How many standard errors it has to be better by."""
_MAD_TO_SIGMA = 1.4826
"""From the median absolute deviation to the standard deviation of a normal distribution."""
_MEDIAN_ERROR = 1.2533
"""The standard error of a median over that of a mean, of a normal distribution."""


class TrialResult(NamedTuple, Generic[P]):
    """A plan, and the median of its costs in one round."""

    plan: P
    cost: float


class TrialSearch(Generic[P]):
    """A search for the plan of least cost.

    Attributes:
        tried: all that has been compared so far, in order.
        chosen: the plan to stay with; None while the search goes on.

    Args:
        default: the plan to stay with if none is better.
        refinements: each takes the best plan so far, and gives the plans to compare with it.
    """

    def __init__(
        self,
        default: P,
        refinements: Sequence[Callable[[P], Sequence[P]]],
        *,
        repeats: int = REPEATS,
        final_repeats: int = FINAL_REPEATS,
    ):
        self.tried: list[TrialResult[P]] = []
        self.chosen: P | None = None
        self._default = self._best = default
        self._refinements = list(refinements)
        self._repeats = repeats
        self._final_repeats = final_repeats
        self._final = False
        self._next_round()

    @property
    def plan(self) -> P:
        """What to use now."""
        if self.chosen is not None:
            return self.chosen
        return self._plans[self._order[len(self._costs)]] if not self.round_is_over else self._best

    @property
    def round_is_over(self) -> bool:
        """Whether `advance` is due."""
        return self.chosen is None and len(self._costs) == len(self._order)

    @property
    def costs(self) -> list[float]:
        """Those of the present round, in the order of measurement: equally many on all ranks."""
        return self._costs

    def measured(self, cost: float) -> None:
        """What `plan` has cost this time."""
        self._costs.append(cost)

    def advance(self, costs: Sequence[float]) -> None:
        """Draw the conclusions of a round, and begin the next one, or choose."""
        first = len(self._plans)  # the first pass does not count
        by_plan: list[list[float]] = [[] for _ in self._plans]
        for number, cost in zip(self._order[first:], costs[first:], strict=True):
            by_plan[number].append(cost)
        medians = [statistics.median(each) for each in by_plan]
        self.tried += map(TrialResult, self._plans, medians)
        if self._final:
            default, other = by_plan
            self.chosen = self._plans[1] if is_better(other, default) else self._default
            return
        self._best = self._plans[medians.index(min(medians))]
        self._next_round()

    def _next_round(self) -> None:
        while self._refinements:
            plans = [self._best, *(plan for plan in self._refinements.pop(0)(self._best) if plan != self._best)]
            if len(plans) > 1:
                self._begin(plans, self._repeats)
                return
        if self._best == self._default:
            self._begin([], 0)
            self.chosen = self._default
            return
        self._final = True
        self._begin([self._default, self._best], self._final_repeats)

    def _begin(self, plans: Sequence[P], repeats: int) -> None:
        self._plans = list(plans)
        self._costs: list[float] = []
        forwards = list(range(len(plans)))
        passes = [forwards if number % 2 == 0 else forwards[::-1] for number in range(1 + repeats)]
        self._order = [number for each in passes for number in each]


def is_better(costs: Sequence[float], than: Sequence[float]) -> bool:
    """Whether these costs are lower by more than the margin and their scatter."""
    gain = statistics.median(than) - statistics.median(costs)
    error = math.hypot(_error_of_median(costs), _error_of_median(than))
    return gain > max(MARGIN * statistics.median(than), SIGMAS * error)


def _error_of_median(costs: Sequence[float]) -> float:
    middle = statistics.median(costs)
    deviation = statistics.median(abs(cost - middle) for cost in costs)
    return _MEDIAN_ERROR * _MAD_TO_SIGMA * deviation / math.sqrt(len(costs))
