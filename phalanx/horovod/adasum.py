"""Adasum: a sum of gradients that reduces the weight of their common component.

It combines two gradients a and b into

    (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b

so orthogonal gradients are added and equal ones averaged. With more ranks (a power of two), neighbors are combined,
then their results, as in a tree; each tensor separately.

Every rank works on its share of all values: it receives that share of all ranks' tensors, the dot products of each tree
level are summed over the ranks (three numbers per pair and tensor), and at the end the shares are exchanged.

Source: Maleki et al. 2021, "Scaling Distributed Training with Adaptive Summation" (MLSys), equation 1 and section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from phalanx.collectives.communicator import Communicator
from phalanx.collectives.fusion_layout import shares
from phalanx.collectives.reduction import is_float, wire_dtype
from phalanx.errors import ConfigurationError
from phalanx.horovod.operation_request import Array

TINY = float(np.sqrt(np.finfo(np.float64).tiny))
"""Squared norms below this count as zero: a zero gradient has no component in common with any other."""


def check(dtypes: Sequence[np.dtype[np.generic]], size: int) -> None:
    """Raise ConfigurationError unless Adasum can combine arrays of these dtypes over `size` ranks."""
    wrong = next((dtype for dtype in dtypes if not is_float(dtype)), None)
    if wrong is not None:
        raise ConfigurationError(f"Adasum is for floats; it got an array of dtype {wrong}. Use Sum.")
    if size & (size - 1):
        raise ConfigurationError(f"Adasum merges pairs, so the number of ranks must be a power of 2; it is {size}.")


def adasum(communicator: Communicator, arrays: Sequence[Array], outs: Sequence[Array]) -> None:
    """Combine all ranks' floating-point arrays into `outs`, possibly the arrays themselves; all ranks must call it."""
    wires = [wire_dtype(array.dtype) for array in arrays]
    for wire in dict.fromkeys(wires):
        chosen = [index for index, one in enumerate(wires) if one == wire]
        merged = _merge([arrays[index].reshape(-1).astype(wire, copy=False) for index in chosen], communicator)
        for index, values in zip(chosen, merged, strict=True):
            outs[index][...] = values.reshape(outs[index].shape)


def combine(left: Array, right: Array, dots: Array) -> Array:
    """Combine two gradients. `dots` are left.right, |left|^2 and |right|^2."""
    both, of_left, of_right = (float(value) for value in dots)
    left_factor = 1.0 - both / (2.0 * of_left) if of_left >= TINY else 1.0
    right_factor = 1.0 - both / (2.0 * of_right) if of_right >= TINY else 1.0
    # If one gradient is tiny compared with the other, its factor may overflow float32, although the product does not.
    is_held = max(abs(left_factor), abs(right_factor)) <= float(np.finfo(left.dtype).max)
    dtype = left.dtype if is_held else np.float64
    combined = left_factor * left.astype(dtype, copy=False) + right_factor * right.astype(dtype, copy=False)
    return combined.astype(left.dtype, copy=False)


def _merge(vectors: Sequence[Array], communicator: Communicator) -> list[Array]:
    """Combine flat arrays of one dtype over the ranks, each separately."""
    # One concatenation, so that a tree level needs one collective for all tensors. Each tensor still has separate
    # factors: `pieces` holds its position in this rank's share.
    sizes = [len(vector) for vector in vectors]
    whole = np.concatenate(vectors) if len(vectors) > 1 else vectors[0]
    bounds = shares(len(whole), communicator.world_size, whole.itemsize)
    rows = communicator.all_to_all([whole[start:stop] for start, stop in bounds])
    pieces = list(_pieces(sizes, *bounds[communicator.rank]))
    while len(rows) > 1:
        # `rows[i]` is this rank's share of the i-th node of the level; initially, of rank i's input.
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        dots = np.zeros((len(pairs), len(vectors), 3))
        for pair, (left, right) in enumerate(pairs):
            for vector, piece in pieces:
                dots[pair, vector] = _dots(left[piece], right[piece])
        # Now the dot products of whole tensors. They, and thus the factors, have the same bits on all ranks.
        (dots,) = communicator.all_reduce([dots])
        rows = [np.empty_like(left) for left, _ in pairs]
        for pair, (left, right) in enumerate(pairs):
            for vector, piece in pieces:
                rows[pair][piece] = combine(left[piece], right[piece], dots[pair, vector])
    merged = np.concatenate(communicator.all_gather(rows[0]))
    return np.split(merged, np.cumsum(sizes)[:-1])


def _dots(left: Array, right: Array) -> tuple[float, float, float]:
    left, right = left.astype(np.float64, copy=False), right.astype(np.float64, copy=False)
    return float(left @ right), float(left @ left), float(right @ right)


def _pieces(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """Yield the vectors in elements `start` to `stop` of their concatenation, and their slices within that range."""
    begin = 0
    for vector, size in enumerate(sizes):
        low, high = max(begin, start), min(begin + size, stop)
        if low < high:
            yield vector, slice(low - start, high - start)
        begin += size
