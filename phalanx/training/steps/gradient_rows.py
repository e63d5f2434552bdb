"""Gradients that consist of single rows of a variable, from several parts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.engines.engine import GradientRows

Array = np.ndarray[Any, Any]


def join_rows(
    numbers_of: Sequence[Array], gradients_of: Sequence[Array], *, is_batch_independent: bool
) -> GradientRows:
    """Join the rows of a batch's parts to those of the whole batch; see `Merge.gather`."""
    summed = _sum_rows(numbers_of, gradients_of) if is_batch_independent else None
    return summed or GradientRows(np.concatenate(numbers_of), np.concatenate(gradients_of))


def _sum_rows(numbers_of: Sequence[Array], gradients_of: Sequence[Array]) -> GradientRows | None:
    """Return the sum over the parts of rows that every batch looks up, as many as its longest sample needs; None if the
    parts have looked up different rows."""
    longest = max(range(len(numbers_of)), key=lambda part: len(numbers_of[part]))
    # A part whose longest sample is shorter looks up a prefix of the same positions. Anything else cannot be matched.
    if any(not np.array_equal(numbers, numbers_of[longest][: len(numbers)]) for numbers in numbers_of):
        return None
    total = np.zeros_like(gradients_of[longest])
    for gradients in gradients_of:
        total[: len(gradients)] += gradients
    return GradientRows(numbers_of[longest], total)
