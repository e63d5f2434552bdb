"""Ranks of a step that one process computes in turn, without communication.

A rank that needs what others have not computed yet is interrupted, and repeats its step when they have: the first time
up to the first collective, then up to the second, and so on. So all state is restored before each attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np

from phalanx.engines.engine import Merge
from phalanx.engines.step_layout import EXTREMES, MergeWeight, StepLayout
from phalanx.keras_compat.global_batch.simulated_ranks import simulated_ranks

Array = np.ndarray[Any, Any]
T = TypeVar("T")

MAX_COLLECTIVES = 128
"""Limit of collectives in one call of `compute`. Each costs one more attempt."""


class CollectivePending(BaseException):
    """A rank needs what the others have not computed yet. Not an error that `except Exception` in a program catches."""


class StepsDifferError(Exception):
    """The ranks do not call the same collectives."""


class TooManyCollectivesError(Exception):
    """The ranks call more collectives than can be tried."""


class _Contribution(NamedTuple):
    """One rank's contribution to a collective. Its kind is the same on all ranks."""

    kind: Any
    arrays: list[Array]


class LocalRanks(Merge):
    """The merge of such ranks, or of one process that has the whole batch.

    Attributes:
        merged: Arrays that the current step has merged so far, in order, with their layouts.
    """

    def __init__(self) -> None:
        # The rank whose step is computed; None: one process, which needs no other.
        self._rank: int | None = None
        self._calls = 0
        self.merged: list[tuple[StepLayout, list[Array]]] = []
        # By number of the collective in a step: the merged arrays, and for rows, where each rank's begin.
        self._merged_collectives: list[tuple[list[Array], list[int]]] = []
        # By rank, the call that interrupted it. An attempt leaves at most one: nothing runs after the interruption.
        self._pending: dict[int, _Contribution] = {}

    def whole(self, step: Callable[[], T]) -> T:
        """Return the result of the step of the whole batch. Its code sees one replica."""
        self._rank, self.merged = None, []
        with simulated_ranks(1):
            return step()

    def compute(self, ranks: int, step: Callable[[int], T], restore: Callable[[], None]) -> list[T]:
        """Return the results of all ranks, in order. Their code sees as many replicas.

        Args:
            ranks: Number of ranks.
            step: Computes the step of a rank. Called several times.
            restore: Restores all state to its values before the step.

        Raises: StepsDifferError; TooManyCollectivesError; what `step` raises.
        """
        self._merged_collectives, self._pending = [], {}
        # Each round starts over, and reaches the first collective that was not merged before.
        for _ in range(MAX_COLLECTIVES):
            finished = []
            for rank in range(ranks):
                restore()
                self._rank, self._calls, self.merged = rank, 0, []
                try:
                    with simulated_ranks(ranks):
                        finished.append(step(rank))
                except CollectivePending:
                    continue
            if len(finished) == ranks:
                return finished
            self._merge_pending(ranks)
        raise TooManyCollectivesError(f"more than {MAX_COLLECTIVES} collectives")

    def _merge_pending(self, ranks: int) -> None:
        """Merge the contributions with which all ranks were interrupted.

        Raises: StepsDifferError if they were not interrupted at the same collective.
        """
        parts = [self._pending[rank] for rank in sorted(self._pending)]
        if len(parts) != ranks or any(_signature(part) != _signature(parts[0]) for part in parts):
            raise StepsDifferError
        self._pending.clear()
        kind = parts[0].kind
        columns = list(zip(*[part.arrays for part in parts], strict=True))
        if kind == "rows":
            starts = np.cumsum([0, *[len(part.arrays[0]) for part in parts]])[:-1]
            self._merged_collectives.append(
                ([np.concatenate(column) for column in columns], [int(start) for start in starts])
            )
            return
        weights = kind.weights if isinstance(kind, StepLayout) else [MergeWeight.ONE] * len(columns)
        merged = [reduce(EXTREMES.get(w, np.add), column) for w, column in zip(weights, columns, strict=True)]
        self._merged_collectives.append((merged, []))

    def all_reduce(self, local: Array, share: float) -> Array:
        return np.array(self._contribute(_Contribution("sum", [local]))[0][0])

    def all_gather(self, local: Array, share: float) -> tuple[Array, int]:
        arrays, starts = self._contribute(_Contribution("rows", [local]))
        return np.array(arrays[0]), starts[self._rank] if starts and self._rank is not None else 0

    def __call__(self, layout: StepLayout, arrays: Sequence[Array], share: float) -> list[Array]:
        flats = layout.allocate()
        # As `StepMerge` scales before its sum. Values that count once, and extremes, are not scaled.
        counts = {MergeWeight.GRADIENT: share, MergeWeight.SHARE: share, MergeWeight.FIRST: float(not self._rank)}
        own = [
            np.asarray(a) * np.asarray(counts.get(w, 1.0), a.dtype) for w, a in zip(layout.weights, arrays, strict=True)
        ]
        merged, _ = self._contribute(_Contribution(layout, own))
        self.merged.append((layout, [np.array(array) for array in merged]))
        for array, view in zip(merged, layout.unpack(flats), strict=True):
            np.copyto(view, array.reshape(view.shape))
        return flats

    def _contribute(self, part: _Contribution) -> tuple[list[Array], list[int]]:
        if self._rank is None:
            return part.arrays, []
        number, self._calls = self._calls, self._calls + 1
        if number < len(self._merged_collectives):
            return self._merged_collectives[number]
        # Copies: backends reuse the memory that they pass to a merge.
        self._pending[self._rank] = _Contribution(part.kind, [np.array(array) for array in part.arrays])
        raise CollectivePending


def _signature(part: _Contribution) -> Any:
    """Return the form of a call, which must be the same on all ranks."""
    first = 1 if part.kind == "rows" else 0
    return part.kind, [(array.shape[first:], array.dtype) for array in part.arrays]
