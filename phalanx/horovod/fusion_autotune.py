"""Finds the fusion threshold and the cycle time in the first rounds of negotiation.

A sample is the time of several rounds that ran operations, per MiB of their arrays. It includes the computation in
between, because fusion determines how much of it overlaps with communication. All ranks count the same rounds and
exchange their samples before they decide, so they change settings in the same round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from phalanx.collectives.autotune.trial_search import MergeCosts, TrialSearch

WARMUP_ROUNDS = 50
"""Number of rounds before the first sample: compilation, and the first trials of the collectives themselves."""
ROUNDS_IN_SAMPLE = 10
FUSION_CHOICES = (2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20, 128 * 2**20)
CYCLE_CHOICES_S = (0.2e-3, 1e-3, 5e-3)


class FusionSettings(NamedTuple):
    """How much travels together, and how often ranks negotiate.

    Attributes:
        threshold: Maximum number of bytes in a batch of operations.
        cycle_s: Seconds between rounds.
    """

    threshold: int
    cycle_s: float

    def __str__(self) -> str:
        return f"fusion threshold {self.threshold / 2**20:g} MiB, cycle time {self.cycle_s * 1e3:g} ms"


class FusionAutotuner:
    """Chooses the settings by measuring rounds.

    Args:
        default: The initial settings, kept if none is better.
        merge_costs: Function that exchanges a round's costs and returns the maximum of each over the ranks.
        report: Function called once, with the finished search.
    """

    def __init__(
        self,
        default: FusionSettings,
        merge_costs: MergeCosts,
        report: Callable[[TrialSearch[FusionSettings]], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._search: TrialSearch[FusionSettings] = TrialSearch(
            default,
            [
                lambda best: [best._replace(threshold=choice) for choice in FUSION_CHOICES],
                lambda best: [best._replace(cycle_s=choice) for choice in CYCLE_CHOICES_S],
            ],
            repeats=3,
            final_repeats=6,
        )
        self._merge_costs = merge_costs
        self._report = report
        self._clock = clock
        self._rounds = -WARMUP_ROUNDS  # of the current sample; negative before the first
        self._bytes = 0  # of the current sample
        self._began = 0.0  # start of the current sample, by `clock`

    @property
    def is_finished(self) -> bool:
        """Whether the settings are chosen."""
        return self._search.choice is not None

    @property
    def settings(self) -> FusionSettings:
        """The settings for the next round."""
        return self._search.plan

    def record_round(self, nbytes: int) -> None:
        """Count a round in which operations ran; all ranks call this after the same rounds.

        Args:
            nbytes: Number of bytes of the operations.
        """
        self._rounds += 1
        if self._rounds <= 0:
            self._began = self._clock()
            return
        self._bytes += nbytes
        if self._rounds < ROUNDS_IN_SAMPLE:
            return
        now = self._clock()
        self._search.record((now - self._began) / max(1, self._bytes) * 2**20, self._merge_costs)
        self._rounds = self._bytes = 0
        if self.is_finished:
            self._report(self._search)
        # Not `now`: exchanging the costs and writing the report would count toward the next sample.
        self._began = self._clock()
