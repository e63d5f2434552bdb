"""The search for threshold and cycle time, with a clock and costs that are made up."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.collectives.autotune.trial_search import TrialSearch
from phalanx.horovod.fusion_autotune import WARMUP_ROUNDS, FusionAutotuner, FusionSettings

DEFAULT = FusionSettings(64 * 2**20, 1e-3)
ROUNDS_BOUND = 2000


def run(cost: Callable[[FusionSettings], float]) -> tuple[TrialSearch[FusionSettings], FusionSettings, int]:
    """The search, what is used after it, and the rounds that it took."""
    now, told = 0.0, []

    def clock() -> float:
        return now

    tuner = FusionAutotuner(DEFAULT, list, told.append, clock=clock)
    for rounds in range(ROUNDS_BOUND):
        if tuner.is_finished:
            (search,) = told
            return search, tuner.settings, rounds
        now += cost(tuner.settings) if rounds > WARMUP_ROUNDS else 100.0
        tuner.record_round(1000)
    raise AssertionError("the search does not end")


def test_a_better_threshold_and_cycle_are_found_and_told_once() -> None:
    search, present, rounds = run(lambda fusion: (0.5 if fusion.threshold == 4 * 2**20 else 1.0) + fusion.cycle_s * 100)
    assert present == search.choice == FusionSettings(4 * 2**20, 0.2e-3)
    assert rounds > WARMUP_ROUNDS


def test_where_nothing_is_better_the_default_stays() -> None:
    _, present, _ = run(lambda fusion: 1.0)
    assert present == DEFAULT
