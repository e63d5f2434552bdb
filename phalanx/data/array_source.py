"""Arrays in memory: every rank indexes only its own rows of each global batch.

This is the hot path of most programs, so it does as little as possible in each step: without shuffling, a batch is a
view of the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from phalanx.arrays import allocation
from phalanx.arrays.tree import leaves, map_leaves
from phalanx.data.batch_split import LocalBatch, local_range, should_be_aligned
from phalanx.data.dataset_elements import Array, describe, to_numpy
from phalanx.data.input_request import InputRequest
from phalanx.data.source import Source, SourceTraits
from phalanx.data.source_registry import unsupported_input_error
from phalanx.errors import ConfigurationError
from phalanx.keras_compat import data_adapters


class _Converted:
    """Rows of data that is not a dense array in memory (sparse, ragged), converted to dense batch by batch."""

    def __init__(self, sliceable: Any):
        self._sliceable = sliceable
        row = self[slice(0, 1)]
        self.shape = row.shape
        self.dtype = row.dtype

    def __getitem__(self, rows: Any) -> Array:
        return np.asarray(to_numpy(self._sliceable[rows]))

    def take(self, rows: Array, axis: int = 0) -> Array:
        return self[rows]


def _to_indexable(sliceable: Any) -> Any:
    """The object that the hot loop indexes: a plain array if possible, determined once instead of per batch."""
    array = sliceable.array
    kind = type(sliceable).__name__
    if "Sparse" in kind or "Ragged" in kind:
        return _Converted(sliceable)
    if kind.startswith("Pandas"):
        return np.ascontiguousarray(sliceable.convert_to_numpy(array))
    return np.asarray(to_numpy(array))


def _gather(array: Any, rows: Array) -> Array:
    """Gather rows of an array, which must exist. A large batch is aligned so that backends need not copy it again."""
    size = len(rows) * array.dtype.itemsize * math.prod(array.shape[1:])
    if isinstance(array, _Converted) or not should_be_aligned(size, array.dtype):
        gathered: Array = array.take(rows, axis=0)
        return gathered
    block = allocation.empty_aligned((len(rows), *array.shape[1:]), array.dtype)
    # "clip" changes no valid index; "raise" would first gather into another buffer.
    array.take(rows, axis=0, out=block, mode="clip")
    return block


SAMPLED_ROWS, SAMPLED_COLUMNS = 16, 8


def sampled_rows(samples: int) -> Array:
    """The numbers of a few samples spread evenly over the data, shape (SAMPLED_ROWS,)."""
    return np.linspace(0, samples - 1, SAMPLED_ROWS).astype(np.int64)


def sample_values(taken: Sequence[Array]) -> Array:
    """A few values of sampled rows, shape (n,), float64, by which the ranks compare their data.

    Args:
        taken: Arrays of SAMPLED_ROWS rows. Arrays of non-numeric dtypes are not compared.
    """
    numbers = [np.zeros(0)]
    for values in taken:
        if values.size and values.dtype.kind in "biuf":
            rows = values.reshape(len(values), -1)
            columns = np.linspace(0, rows.shape[1] - 1, SAMPLED_COLUMNS).astype(np.int64)
            numbers.append(rows[:, columns].astype(np.float64).ravel())
    return np.concatenate(numbers)


class ArraySource(Source):
    """Arrays of equal length, cut into global batches.

    With `shuffle=True`, each pass shuffles all rows; with "batch", only the rows within each batch. Without a
    `shuffling`, the orders follow from `seed` and the pass.
    """

    num_batches: int
    samples: int

    def __init__(self, request: InputRequest):
        super().__init__(request)
        if request.batch_size is not None and request.batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1; got {request.batch_size}.")
        sliceables, self.samples, self._batch_size = data_adapters.standardize_arrays(
            request.x,
            request.y,
            request.sample_weight,
            batch_size=request.batch_size,
            steps_per_epoch=request.steps_per_epoch,
            class_weight=request.class_weight,
        )
        if self.samples == 0:
            raise ConfigurationError("The input is empty: x holds 0 samples. Expected at least one.")
        self._data = map_leaves(_to_indexable, sliceables)
        self._shuffle = request.shuffle
        self._seed = request.seed
        self._shuffling = request.shuffling
        self._keras_orders: Iterator[Array] | None = None  # of successive passes; drawn from the program's generators
        self.num_batches = -(-self.samples // self._batch_size)
        self.traits = SourceTraits(
            "arrays",
            signature=f"{self.samples} samples of {describe(self._data)} in global batches of {self._batch_size}, "
            f"shuffle={request.shuffle}",
            reason="each replica indexes only its own rows",
            is_uniform=True,
            is_compared=False,
            is_random_access=True,
            fixed_size=None if self.samples % self._batch_size else self._batch_size,
            is_in_memory=True,
            describe_share=partial(_describe_share, self.samples, self._batch_size, request.shuffle),
        )

    @property
    def sampled_values(self) -> Array:
        rows = sampled_rows(self.samples)
        return sample_values([np.asarray(leaf[rows]) for leaf in leaves(self._data)])

    def rows(self, key: int, batch: int) -> Array:
        first = batch * self._batch_size
        stop = min(first + self._batch_size, self.samples)
        return self._permutation(key)[first:stop] if self._shuffle else np.arange(first, stop)

    def read(self, key: int, start: int, stop: int | None) -> Iterator[LocalBatch]:
        assert stop is not None, "the length of arrays is known"
        return self._slices(self._permutation(key) if self._shuffle else None, start, stop)

    def peek(self, *, restart: bool = False) -> LocalBatch:
        if restart and self._shuffle and self._shuffling is not None:
            self._keras_orders = self._orders(peeked=True)
        return next(self._slices(None, 0, 1))

    def _slices(self, order: Array | None, start: int, stop: int) -> Iterator[LocalBatch]:
        data, rank, world_size = self._data, self._rank, self._world_size
        batch_size, samples = self._batch_size, self.samples
        for first in range(start * batch_size, stop * batch_size, batch_size):
            global_size = min(batch_size, samples - first)
            low, high = local_range(global_size, rank, world_size)
            size = high - low
            # The placeholder for an empty share is the first row of the batch, which always exists.
            rows = slice(first + low, first + high) if size else slice(first, first + 1)
            if order is None:
                part = map_leaves(lambda array, rows=rows: array[rows], data)  # type: ignore[misc]
            else:
                indices = order[rows]
                part = map_leaves(lambda array, i=indices: _gather(array, i), data)  # type: ignore[misc]
            yield LocalBatch(part, size, global_size, None)

    def _permutation(self, key: int) -> Array:
        order: Array = self.order.get(key, self._new_order)
        return order

    def _new_order(self, key: int) -> Array:
        if self._shuffling is not None:
            if self._keras_orders is None:
                self._keras_orders = self._orders(peeked=False)
            # Every process draws, so that a seeded program's next random numbers are equal on all.
            return self._shuffling.from_chief(next(self._keras_orders).astype(np.int64))
        random = np.random.default_rng([self._seed, key])
        if self._shuffle == "batch":
            # Sorting by batch number plus a random fraction shuffles within each batch, all batches at once.
            return np.argsort(np.arange(self.samples) // self._batch_size + random.random(self.samples), kind="stable")
        return random.permutation(self.samples)

    def _orders(self, *, peeked: bool) -> Iterator[Array]:
        return data_adapters.shuffled_orders(self.samples, self._batch_size, self._shuffle, reads_ahead=peeked)


# Not a method: a reference cycle would keep the source's data alive until a garbage collection.
def _describe_share(samples: int, batch_size: int, shuffle: bool | str, rank: int, world_size: int) -> str:
    full = min(batch_size, samples)
    low, high = local_range(full, rank, world_size)
    if low == high:
        return f"gets nothing: the global batch of {full} is smaller than the {world_size} replicas"
    order = "in an order shuffled alike on every rank" if shuffle else "in order"
    return f"indexes samples {low} to {high - 1} of each {full} of the {samples}, {order}"


def make_source(request: InputRequest) -> ArraySource:
    """Create the source of arrays. Raises TypeError for an input that Keras does not accept as arrays."""
    if request.x is None or not data_adapters.is_arrays(request.x, request.y, request.sample_weight):
        raise unsupported_input_error(request)
    return ArraySource(request)
