"""The samples that losses, metrics and steps are tried with before the first step."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MOST = 256
"""Samples of a part. A loss or a metric may take the sixteen largest, or be no number where no sample is positive."""
MOST_VALUES = 2**24
"""Of an array of all parts: so many of a language model's outputs would not fit into memory."""


def part_size(samples: int, parts: int, values_per_sample: int) -> int:
    """How many samples each part has, where that should be as many as a replica has.

    Args:
        samples: of a replica.
        parts: of that size, which are tried together.
        values_per_sample: of the largest array.
    """
    return max(1, min(samples, MOST, MOST_VALUES // (parts * values_per_sample)))


def scaled(array: Array, factors: Array) -> Array:
    """The array with each sample multiplied by its factor."""
    return np.asarray(array * factors.reshape(-1, *[1] * (array.ndim - 1)).astype(array.dtype))
