"""The search, over costs that are made up: it finds what is better, and never what is worse."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

import pytest

from phalanx.collectives.autotune.trial_search import MARGIN, MergeCosts, TrialSearch, is_better

Plan = tuple[str, int]
DEFAULT: Plan = ("shared", 512)
REFINEMENTS: list[Callable[[Plan], list[Plan]]] = [
    lambda best: [("shared", 512), ("ring", 256)],
    lambda best: [(best[0], size) for size in (128, 256, 512, 1024)],
]
STEPS_BOUND = 200


def run(cost: Callable[[Plan], float], merge: MergeCosts = lambda own: own) -> TrialSearch[Plan]:
    search: TrialSearch[Plan] = TrialSearch(DEFAULT, REFINEMENTS)
    for _ in range(STEPS_BOUND):
        if search.choice is not None:
            return search
        search.record(cost(search.plan), merge)
    raise AssertionError("the search does not end")


def noisy(true: Callable[[Plan], float], seed: int, noise: float) -> Callable[[Plan], float]:
    """A cost that scatters, with now and then a large outlier, and drifts."""
    generator = random.Random(seed)
    calls = iter(range(10**6))

    def cost(plan: Plan) -> float:
        factor = 1 + noise * abs(generator.gauss(0, 1)) + 0.001 * next(calls)
        return true(plan) * factor * (10 if generator.random() < 0.05 else 1)

    return cost


@pytest.mark.parametrize("seed", range(20))
def test_a_clearly_better_plan_is_found_in_spite_of_noise(seed: int) -> None:
    true = {("shared", 512): 1.0, ("ring", 256): 0.6, ("ring", 128): 0.4}
    search = run(noisy(lambda plan: true.get(plan, 1.5), seed, noise=0.1))
    assert search.choice == ("ring", 128)


def test_what_is_chosen_is_never_worse_than_the_default_by_more_than_noise() -> None:
    for seed in range(200):
        generator = random.Random(seed)
        true = {
            (name, size): generator.uniform(0.8, 1.6) for name in ("shared", "ring") for size in (128, 256, 512, 1024)
        }
        search = run(noisy(true.__getitem__, seed, noise=0.1))
        assert search.choice is not None
        assert true[search.choice] <= true[DEFAULT] * 1.05, seed


def test_where_all_are_alike_the_default_stays() -> None:
    assert sum(run(noisy(lambda plan: 1.0, seed, noise=0.1)).choice != DEFAULT for seed in range(100)) <= 2
    assert run(lambda plan: 1.0).choice == DEFAULT
    assert run(lambda plan: 1.0 if plan == DEFAULT else 1.0 - MARGIN / 2).choice == DEFAULT


def test_ranks_that_merge_their_costs_take_the_same_decisions() -> None:
    costs = [noisy(lambda plan: plan[1] / 512, seed, noise=0.5) for seed in range(3)]
    searches = [TrialSearch(DEFAULT, REFINEMENTS) for _ in costs]
    brought: list[Sequence[float]] = []
    merged: list[float] = []

    def bring(costs: Sequence[float]) -> Sequence[float]:
        brought.append(costs)
        return costs

    for _ in range(STEPS_BOUND):
        assert len({(search.plan, search.choice) for search in searches}) == 1
        if searches[0].choice is not None:
            return
        brought.clear()
        own = [cost(search.plan) for search, cost in zip(searches, costs, strict=True)]
        for search, one in zip(copy.deepcopy(searches), own, strict=True):
            search.record(one, bring)
        merged[:] = [min(each) for each in zip(*brought, strict=True)]
        for search, one in zip(searches, own, strict=True):
            search.record(one, lambda _: merged)
    raise AssertionError("the search does not end")


def test_all_that_was_compared_is_told() -> None:
    search = run(lambda plan: plan[1] / 512)
    assert search.choice == ("ring", 128)
    assert [tried.plan for tried in search.results[-2:]] == [DEFAULT, ("ring", 128)]
    assert [tried.cost for tried in search.results[-2:]] == [1.0, 0.25]


def test_without_a_choice_there_is_no_search() -> None:
    assert TrialSearch(DEFAULT, [lambda best: [best]]).choice == DEFAULT


def test_better_means_by_more_than_margin_and_scatter() -> None:
    assert is_better([0.9] * 5, than=[1.0] * 5)
    assert not is_better([0.98] * 5, than=[1.0] * 5)
    assert not is_better([0.5, 0.9, 1.3, 0.7, 1.1], than=[0.6, 1.0, 1.4, 0.8, 1.2])
