"""Combination of the losses of a batch's parts to the loss of the batch: computed as ranks would, in one process.

A loss whose parts merge to the loss of the whole batch is a mean over the samples. If they do only once it is noted as
a sum (`global_losses.mark_as_sum`), it is a sum. Anything else relates samples, or divides one sum by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import numpy as np

from phalanx.engines import make_tensors
from phalanx.engines.local_ranks import LocalRanks
from phalanx.engines.merge_collectives import MergeCollectives
from phalanx.keras_compat.global_batch.global_losses import GloballyScaledLosses, is_marked_as_sum, mark_as_sum
from phalanx.keras_compat.global_batch.step_collectives import StepScope
from phalanx.keras_compat.global_batch.step_means import WeightedStepMeans
from phalanx.keras_compat.variables.host_values import to_host

Array = np.ndarray[Any, Any]
Loss = Callable[..., Any]
T = TypeVar("T")

TOLERANCE, HALF_TOLERANCE = 2e-5, 2e-2
"""Relative to the largest of the compared numbers; the second applies to losses computed in half precision."""

ZERO = 1e-12
"""Losses up to this value count as zero and reveal nothing."""


class Combination(Enum):
    """Rule by which the losses of two parts of a batch combine to the loss of the batch."""

    MEAN = "mean"
    SUM = "sum"
    UNSCALED_SUM = "unscaled sum"
    """A sum that steps do not scale, because it does not come from `Loss.__call__`."""
    OTHER = "other"
    UNKNOWN = "unknown"
    """The loss is random, zero, or not a number."""


SUMS = (Combination.SUM, Combination.UNSCALED_SUM)


def combination_of(function: Loss, whole: Any, parts: Sequence[Any], rows: Sequence[int], loss: Any) -> Combination:
    """Determine how ranks with these parts would combine a loss."""
    # Computed twice: a loss that draws random numbers differs from itself.
    (expected, _), (once_more, _) = (_merged(function, [whole], [sum(rows)]) for _ in range(2))
    if not np.isfinite([expected, once_more]).all() or not is_close(expected, once_more, expected):
        return Combination.UNKNOWN
    tolerance = tolerance_of(getattr(loss, "dtype", None))
    merged, sizes = _merged(function, parts, rows)
    if _is_inconclusive(expected, merged, *sizes):
        return Combination.UNKNOWN
    if is_close(expected, merged, *sizes, tolerance=tolerance):
        return Combination.MEAN
    # Now as if it were a sum; the note is removed in any case.
    with marked_as_sums([loss]):
        scaled, of_parts = _merged(function, parts, rows)
    if is_close(expected, scaled, *of_parts, tolerance=tolerance):
        return Combination.SUM
    # Steps scale what `Loss.__call__` returns, which a loss with a custom `__call__` may not call.
    is_sum = is_close(expected, sum(sizes), *sizes, tolerance=tolerance)
    return Combination.UNSCALED_SUM if is_sum else Combination.OTHER


def _merged(function: Loss, parts: Sequence[Any], rows: Sequence[int]) -> tuple[float, list[float]]:
    """Return the loss that ranks with these parts would train with, and the loss that each computes for its part."""
    values = compute_as_ranks(lambda part: _number(function(part)), parts, rows)
    return sum(v * count for v, count in zip(values, rows, strict=True)) / sum(rows), values


def compute_as_ranks(function: Callable[[Any], T], parts: Sequence[Any], rows: Sequence[int]) -> list[T]:
    """Return what ranks with these parts and row counts compute in a step with working collectives.

    Args:
        function: Computes a rank's result from its part; called several times.

    Raises: as `LocalRanks.compute`.
    """
    ranks = LocalRanks()
    collectives = MergeCollectives(ranks, make_tensors().call)

    def compute(rank: int) -> T:
        means = WeightedStepMeans(partial(float, rows[rank] / sum(rows)))
        with GloballyScaledLosses(rows[rank]), means, StepScope(collectives):
            return function(parts[rank])

    return ranks.compute(len(parts), compute, restore=lambda: None)


def combination_of_values(whole: float, parts: Sequence[float], rows: Sequence[int], tolerance: float) -> Combination:
    """Apply `combination_of` to loss values: one for the batch, and one for each part with its row count."""
    numbers = [whole, *parts]
    if _is_inconclusive(*numbers):
        return Combination.UNKNOWN
    if is_close(whole, float(np.average(parts, weights=rows)), *numbers, tolerance=tolerance):
        return Combination.MEAN
    return Combination.SUM if is_close(whole, sum(parts), *numbers, tolerance=tolerance) else Combination.OTHER


def _is_inconclusive(*losses: float) -> bool:
    """Whether one of the losses is not finite, or all are zero."""
    return not np.isfinite(losses).all() or max(map(abs, losses)) <= ZERO


def tolerance_of(dtype: Any) -> float:
    """Return the relative tolerance for losses computed in this dtype."""
    return HALF_TOLERANCE if dtype in ("float16", "bfloat16") else TOLERANCE


def is_close(left: float, right: float, *sizes: float, tolerance: float = 1e-6) -> bool:
    """Whether two losses are equal, relative to the largest of them and of other numbers."""
    return abs(left - right) <= tolerance * max(map(abs, (left, right, *sizes)))


def _number(value: Any) -> float:
    """Return the value of a loss; NaN if it is not a scalar."""
    array = to_host(value).astype(np.float64)
    return float(array) if array.ndim == 0 else float("nan")


@contextmanager
def marked_as_sums(losses: Sequence[Any]) -> Iterator[None]:
    """Merge these losses as sums inside the context."""
    noted = [loss for loss in losses if not is_marked_as_sum(loss)]
    for loss in noted:
        mark_as_sum(loss)
    try:
        yield
    finally:
        for loss in noted:
            mark_as_sum(loss, is_sum=False)
