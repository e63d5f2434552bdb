"""The merges that a server has completed. A repeated push gets the response that was lost before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from phalanx.parameter_server.server_protocol import Worker

Array = np.ndarray[Any, Any]
MergeKey = tuple[int, int]
"""A ticket's serial and the phase of its step."""

MAX_KEYS = 1000
"""Number of completed merges to remember: more than any worker can be behind."""
MIN_RESULTS = 8
"""Number of results to keep for workers that repeat a push; the newest result of each worker is always kept."""


@dataclass(frozen=True)
class MergeResult:
    """The result of a completed merge.

    Attributes:
        members: Workers whose gradients it contains.
        extras: The merged extras.
    """

    members: tuple[Worker, ...]
    extras: list[Array]


class MergeHistory:
    """Completed merges and recent results. Protected by the store's lock."""

    def __init__(self) -> None:
        self._completed: dict[MergeKey, None] = {}  # the newest, in order of completion
        self._completed_up_to: MergeKey = (-1, -1)  # all merges up to this one are completed
        self._results: dict[MergeKey, MergeResult] = {}
        self._newest_by_member: dict[Worker, MergeKey] = {}

    def record(self, key: MergeKey, result: MergeResult) -> None:
        self._completed[key] = None
        self._results[key] = result
        self._newest_by_member |= dict.fromkeys(result.members, key)
        if len(self._results) > 2 * MIN_RESULTS:  # rarely, and then many at once
            kept = self._newest_by_member.values()
            outdated = (key for key in self._results if key not in kept)
            for old in list(islice(outdated, len(self._results) - MIN_RESULTS)):
                del self._results[old]
        if len(self._completed) > MAX_KEYS:
            oldest = next(iter(self._completed))
            del self._completed[oldest]
            # Asynchronous steps complete out of order, but only synchronous ones ask `is_completed`.
            self._completed_up_to = max(self._completed_up_to, oldest)

    def result_for(self, key: MergeKey, member: Worker) -> MergeResult | None:
        """The result of a completed merge that contains this worker's gradients; None if there is none."""
        result = self._results.get(key)
        return result if result is not None and member in result.members else None

    def is_completed(self, key: MergeKey) -> bool:
        return key in self._completed or key <= self._completed_up_to

    def newest_serial(self) -> int:
        """Serial of the newest completed step; -1 before the first."""
        return max((*self._completed, self._completed_up_to))[0]

    def state(self) -> tuple[tuple[tuple[int, int, tuple[Worker, ...], int], ...], list[Array]]:
        """The results as `GroupState.completed`, and their extras in order."""
        extras = [array for result in self._results.values() for array in result.extras]
        return tuple((*key, each.members, len(each.extras)) for key, each in self._results.items()), extras

    @classmethod
    def from_state(
        cls, completed: Sequence[tuple[int, int, tuple[Worker, ...], int]], extras: Iterable[Array]
    ) -> MergeHistory:
        """The history described by `state`."""
        history, arrays = cls(), iter(extras)
        for serial, phase, members, number in completed:
            history.record((serial, phase), MergeResult(members, _take_arrays(arrays, number)))
        # Earlier merges are no longer known. Updates outside epochs have negative serials, which do not indicate the
        # order.
        history._completed_up_to = max(
            [history._completed_up_to, *((serial, phase) for serial, phase, _, _ in completed)]
        )
        return history


def _take_arrays(arrays: Iterator[Array], number: int) -> list[Array]:
    return list(islice(arrays, number))
