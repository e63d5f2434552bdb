"""Samples with which losses, metrics and steps are tried before the first step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.collectives.reduction import is_float
from phalanx.keras_compat import model_state

Array = np.ndarray[Any, Any]

TRIAL_RANKS = 2
"""Number of replicas that take a tried step or prediction."""
TRIAL_PART_SIZE = 8
"""Number of samples of each of them: few; equal, so that JAX compiles two steps and not three; and divisible into
groups of two, four or eight, as some layers need."""
MAX_PART_SAMPLES = 256
"""Maximum samples of a part. A loss or metric may use the sixteen largest, or be NaN if no sample is positive."""
MAX_PART_FACTOR = 2
"""Maximum multiple of a replica's samples: a step on all of a large global batch takes much time and memory."""
MAX_VALUES = 2**24
"""Maximum values in an array of all parts: more outputs of a language model would not fit into memory."""


def part_size(samples: int, parts: int, replicas: int, values_per_sample: int) -> int:
    """Return the number of samples in each part: a replica's, or up to `MAX_PART_FACTOR` times as many to fill the
    global batch.

    Args:
        samples: Number of samples of a replica.
        parts: Number of parts that are tried together.
        replicas: Number of replicas that share the global batch.
        values_per_sample: Values per sample of the largest array.
    """
    wanted = max(samples, min(MAX_PART_FACTOR * samples, math.ceil(samples * replicas / parts)))
    return max(1, min(wanted, MAX_PART_SAMPLES, MAX_VALUES // (parts * values_per_sample)))


def values_per_sample(data: Any) -> int:
    """Return the number of values per sample of the largest array."""
    samples = model_state.samples(data)
    return max(1, *(np.size(array) // samples for array in leaves(data) if array is not None))


def scaled(array: Array, factors: Array) -> Array:
    """Multiply each sample of the array by its factor."""
    return np.asarray(array * factors.reshape(-1, *[1] * (array.ndim - 1)).astype(array.dtype))


def trial_part_sizes(data: Any, replicas: int) -> tuple[int, ...]:
    """Return the numbers of samples to try in each part: first few, then as many as a replica has.

    Code may use the ten largest samples, or depend on their number.

    Args:
        data: Batch of a replica.
        replicas: Number of replicas that share the global batch.
    """
    samples = model_state.samples(data)
    # A replica is about to take steps on this many samples, however many values they have.
    rows = max(samples, part_size(samples, TRIAL_RANKS, replicas, values_per_sample(data)))
    return (TRIAL_PART_SIZE,) if rows == TRIAL_PART_SIZE else (TRIAL_PART_SIZE, rows)


def take_trial_samples(data: Any, attempt: int, part: int) -> Any:
    """Return the samples of all parts; if there are too few, repeated with slightly changed inputs."""
    size, number = model_state.samples(data), TRIAL_RANKS * part
    order = np.random.default_rng(attempt).permutation(size) if attempt else np.arange(size)
    # Copies of a sample are adjacent, so that parts differ in samples, and ratios of sums differ between parts.
    places = np.sort(np.resize(np.arange(size), number))
    chosen, copy = order[places], np.arange(number) - np.searchsorted(places, places)

    def changed(array: Array) -> Array:  # identical copies reveal nothing about relations between samples
        return scaled(array, 0.9**copy) if is_float(array.dtype) else array

    x, *others = map_leaves(lambda array: np.asarray(array)[chosen], data)
    # Targets are unchanged: Keras's hinge losses check whether all targets of a batch are 0 or 1.
    return (map_leaves(changed, x) if size < number else x, *others)


def with_reflected_inputs(data: Any, part: int) -> Any:
    """Reflect the inputs in half of the first replica's samples, so that the largest become the smallest. Its texts
    become short."""

    def changed(array: Array) -> Array:
        found = _with_short_texts(np.array(array), part)
        if is_float(found.dtype) or found.dtype.kind in "iu":
            rows = slice(0, part // 2 + 1)
            found[rows] = found.max() + found.min() - found[rows]
        return found

    return (map_leaves(changed, data[0]), *data[1:])


def with_short_texts(data: Any, part: int) -> Any:
    """Cut the texts in the first replica's samples to their first words: a layer may pad texts to the longest one."""
    return (map_leaves(lambda array: _with_short_texts(np.asarray(array), part), data[0]), *data[1:])


def _with_short_texts(array: Array, part: int) -> Array:
    if array.dtype.kind not in "OSU":
        return array
    shorten = np.vectorize(lambda text: (text.split() or [text])[0] if isinstance(text, str | bytes) else text, ["O"])
    return np.concatenate([shorten(array[:part]).astype(array.dtype), array[part:]])


def part_of(data: Any, rank: int, part: int) -> Any:
    """Return the samples of one replica."""
    return map_leaves(lambda array: array[rank * part : (rank + 1) * part], data)
