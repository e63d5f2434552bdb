"""Ranks that one process computes in turn get what ranks of a job would."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.engines.local_ranks import LocalRanks, StepsDifferError
from phalanx.engines.step_layout import MergeWeight, StepLayout

WEIGHTS = [MergeWeight.SHARE, MergeWeight.ONE, MergeWeight.FIRST, MergeWeight.MAX]


def run(ranks, steps):
    """The results of steps, each called with its rank."""
    return ranks.compute(len(steps), lambda rank: steps[rank](rank), lambda: None)


def test_ranks_meet_at_each_collective_in_turn():
    ranks = LocalRanks()

    def step(rank):
        total = ranks.all_reduce(np.array([1.0 + rank]), 0.5)
        rows, start = ranks.all_gather(np.full((1 + rank, 2), rank), 0.5)
        arrays = [np.array([2.0 * rank + total[0]])] * 4
        layout = StepLayout.of(arrays, WEIGHTS)
        merged = [float(array[0]) for array in layout.unpack(ranks(layout, arrays, 0.25 if rank == 0 else 0.75))]
        return total.tolist(), rows[:, 0].tolist(), start, merged

    merged = [0.25 * 3 + 0.75 * 5, 8.0, 3.0, 5.0]
    assert run(ranks, [step, step]) == [([3.0], [0, 1, 1], 0, merged), ([3.0], [0, 1, 1], 1, merged)]


def test_the_whole_batch_meets_no_one():
    ranks = LocalRanks()
    layout = StepLayout.of([np.ones(2)], [MergeWeight.GRADIENT])

    def step():
        return ranks.all_reduce(np.ones(1), 1.0)[0], ranks(layout, [np.full(2, 3.0)], 1.0)[0].tolist()

    assert ranks.whole(step) == (1.0, [3.0, 3.0])


def test_steps_that_do_not_meet_are_told_apart():
    ranks = LocalRanks()
    steps = [lambda rank: ranks.all_reduce(np.ones(1), 0.5), lambda rank: ranks.all_gather(np.ones(1), 0.5)]
    with pytest.raises(StepsDifferError):
        run(ranks, steps)
