"""The samples that losses, metrics and steps are tried with before the first step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.collectives.reduction import is_float
from phalanx.keras_compat import model_state

Array = np.ndarray[Any, Any]

RANKS = 2
"""Replicas that take a tried step or prediction."""
PART = 8
"""Samples of each of them: few; as many, so that JAX compiles two steps and not three; and groups of two, four or
eight, as some layers make where they can."""
MOST = 256
"""Samples of a part. A loss or a metric may take the sixteen largest, or be no number where no sample is positive."""
MOST_TIMES = 2
"""So many times what a replica has: a step of all of a large global batch takes long, and memory."""
MOST_VALUES = 2**24
"""Of an array of all parts: so many of a language model's outputs would not fit into memory."""


def part_size(samples: int, parts: int, replicas: int, values_per_sample: int) -> int:
    """How many samples each part has, where it should be as large as a replica's, and all parts as the global batch, if
    that has few times as many.

    Args:
        samples: of a replica.
        parts: of that size, which are tried together.
        replicas: that share the global batch.
        values_per_sample: of the largest array.
    """
    wanted = max(samples, min(MOST_TIMES * samples, math.ceil(samples * replicas / parts)))
    return max(1, min(wanted, MOST, MOST_VALUES // (parts * values_per_sample)))


def values_per_sample(data: Any) -> int:
    """Of the largest array."""
    samples = model_state.samples(data)
    return max(1, *(np.size(array) // samples for array in leaves(data) if array is not None))


def scaled(array: Array, factors: Array) -> Array:
    """The array with each sample multiplied by its factor."""
    return np.asarray(array * factors.reshape(-1, *[1] * (array.ndim - 1)).astype(array.dtype))


def sizes_of_parts(data: Any, replicas: int) -> tuple[int, ...]:
    """Numbers of samples to try with in each part: few; and where those do not tell, as something takes the ten
    largest or depends on how many there are, as many as a replica has.

    Args:
        data: of a replica.
        replicas: that share the global batch.
    """
    samples = model_state.samples(data)
    # Steps of a replica's own samples are about to be taken, however many values they have.
    rows = max(samples, part_size(samples, RANKS, replicas, values_per_sample(data)))
    return (PART,) if rows == PART else (PART, rows)


def few_samples(data: Any, attempt: int, part: int) -> Any:
    """The samples of all parts; the same again, with inputs that are changed a little, where there are too few."""
    size, number = model_state.samples(data), RANKS * part
    order = np.random.default_rng(attempt).permutation(size) if attempt else np.arange(size)
    # The same sample comes again at once, so that parts have others, and a ratio of sums differs from one to the next.
    places = np.sort(np.resize(np.arange(size), number))
    chosen, copy = order[places], np.arange(number) - np.searchsorted(places, places)

    def changed(array: Array) -> Array:  # the same again says nothing of what relates samples
        return scaled(array, 0.9**copy) if is_float(array.dtype) else array

    x, *others = map_leaves(lambda array: np.asarray(array)[chosen], data)
    # Targets stay as they are: Keras's hinge losses ask whether all of a batch are 0 or 1.
    return (map_leaves(changed, x) if size < number else x, *others)


def with_unlike_parts(data: Any, part: int) -> Any:
    """A batch, with the largest inputs for the smallest, and so on, in half of the first replica's samples."""

    def changed(array: Array) -> Array:
        found = np.array(array)
        if is_float(found.dtype) or found.dtype.kind in "iu":
            rows = slice(0, part // 2 + 1)
            found[rows] = found.max() + found.min() - found[rows]
        return found

    return (map_leaves(changed, data[0]), *data[1:])


def part_of(data: Any, rank: int, part: int) -> Any:
    """The samples that a replica has."""
    return map_leaves(lambda array: array[rank * part : (rank + 1) * part], data)
