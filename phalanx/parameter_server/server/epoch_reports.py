"""The workers' counts in an epoch, and the merge of their reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.engines.step_layout import EXTREMES, MergeWeight
from phalanx.parameter_server.server_messages import EpochReport
from phalanx.parameter_server.server_protocol import Worker

Array = np.ndarray[Any, Any]

EXTREME_VALUES = frozenset(weight.value for weight in EXTREMES)
"""Kinds of merged values that are not summed."""


class EpochReports:
    """Reports of one epoch. Protected by the schedule's lock.

    Attributes:
        participants: Workers that took part in the epoch, and must report.
        completed: Number of steps that the workers have completed, including lost workers.
    """

    def __init__(self) -> None:
        self.participants: set[Worker] = set()
        self.completed = 0
        self._by_worker: dict[Worker, tuple[EpochReport, Sequence[Array]]] = {}

    def add(self, worker: Worker, report: EpochReport, arrays: Sequence[Array]) -> None:
        """Add a worker's report, which replaces an earlier one of the same worker."""
        self.participants.add(worker)
        self._by_worker[worker] = (report, arrays)

    def missing(self) -> set[Worker]:
        """The participants that have not reported yet."""
        return self.participants - self._by_worker.keys()

    def describe_lost(self) -> str:
        """A note for the chief, if lost workers have not reported the metrics of steps that they completed."""
        lost = self.completed - sum(report.steps for report, _ in self._by_worker.values())
        if lost <= 0:
            return ""
        return f"the metrics of {lost} of {self.completed} batches are lost with their worker"

    def merged(self) -> tuple[list[Array], int]:
        """All reports merged, in the workers' order, and the number of samples.

        Counters are summed; means are weighted by samples.
        """
        reports = [self._by_worker[worker] for worker in sorted(self._by_worker)]
        total = sum(report.samples for report, _ in reports)
        first, _ = reports[0]
        return [
            _merged(weight, [(report.samples / (total or 1), own[number]) for report, own in reports])
            for number, weight in enumerate(first.weights)
        ], total


def merged_extremes(weight: str, shares: Sequence[float], arrays: Sequence[Array]) -> Array:
    """The maximum or minimum over the arrays that have samples."""
    counted = [array for share, array in zip(shares, arrays, strict=True) if share] or [arrays[0]]
    return np.asarray(EXTREMES[MergeWeight(weight)].reduce(np.stack(counted)))


def _merged(weight: str, parts: Sequence[tuple[float, Array]]) -> Array:
    """Merge one array of all reports, given each report's fraction of the samples and its array."""
    _, first = parts[0]
    if weight == MergeWeight.FIRST.value:
        return first
    if weight in EXTREME_VALUES:
        return merged_extremes(weight, *zip(*parts, strict=True))
    # Counters (ONE) are added as they are: a worker without samples has added nothing to them.
    shares = [share if weight == MergeWeight.SHARE.value else 1 for share, _ in parts]
    result = np.sum([array * share for share, (_, array) in zip(shares, parts, strict=True)], axis=0)
    return np.asarray(result).astype(first.dtype)
