"""What the workers counted in an epoch, and how it is put together."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from phalanx.engines.step_layout import MergeWeight
from phalanx.parameter_server.server.connected_workers import Worker
from phalanx.parameter_server.server_messages import EpochReport

Array = np.ndarray[Any, Any]


class EpochReports:
    """Of the epochs of a `fit`. Its owner's lock protects it."""

    def __init__(self) -> None:
        self._of_epoch: dict[tuple[int, int], dict[Worker, tuple[EpochReport, Sequence[Array]]]] = {}

    def add(self, worker: Worker, report: EpochReport, arrays: Sequence[Array]) -> None:
        """The worker's report; a second one of the same epoch counts instead of the first."""
        self._of_epoch.setdefault((report.fit, report.epoch), {})[worker] = (report, arrays)

    def clear(self) -> None:
        self._of_epoch.clear()

    def by(self, fit: int, epoch: int) -> Set[Worker]:
        """Who has reported."""
        return self._of_epoch.get((fit, epoch), {}).keys()

    def merged(self, fit: int, epoch: int) -> tuple[list[Array], int]:
        """All reports of an epoch as one, in the workers' order, and its samples: counters are summed; what is a mean
        is weighted by samples."""
        by_worker = self._of_epoch[fit, epoch]
        reports = [by_worker[worker] for worker in sorted(by_worker)]
        total = sum(report.samples for report, _ in reports)
        first, _ = reports[0]
        return [
            _merged(weight, [(report.samples / (total or 1), own[number]) for report, own in reports])
            for number, weight in enumerate(first.weights)
        ], total


def _merged(weight: str, parts: Sequence[tuple[float, Array]]) -> Array:
    """One array of all reports, from each one's share of the samples and its own."""
    _, first = parts[0]
    if weight == MergeWeight.FIRST.value:
        return first
    shares = [share if weight == MergeWeight.SHARE.value else 1 for share, _ in parts]
    result = np.sum([array * share for share, (_, array) in zip(shares, parts, strict=True)], axis=0)
    return np.asarray(result).astype(first.dtype)
