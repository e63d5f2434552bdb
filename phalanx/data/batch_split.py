"""Splitting a global batch into one local batch per rank."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np

from phalanx.arrays.allocation import aligned_copy
from phalanx.arrays.tree import leaves, map_leaves
from phalanx.data.dataset_elements import Array, unpack
from phalanx.errors import ConfigurationError

ALIGNED_FROM_BYTES = 128 * 1024
"""Batch size from which an aligned allocation pays off; copying a smaller batch is faster."""

FINGERPRINT_BYTES = 4096
"""Size of the part of an array that a fingerprint reads: enough to distinguish two orders of the same data, in one or
two microseconds."""


class LocalBatch(NamedTuple):
    """One rank's contiguous part of one global batch.

    Attributes:
        data: Structures of NumPy arrays: an element of a source, or the `(x, y, sample_weight)` to which Keras unpacks
            it, with None for missing parts. If `size` is 0, the arrays still hold one sample: a placeholder with the
            right shapes and dtypes (taken from the global batch), which is computed with weight zero.
        size: Number of samples in this part, 0 or more.
        global_size: Number of samples in the global batch over all ranks; None if no single rank knows it (per-rank
            pipelines).
        fingerprint: Checksum of the whole element, equal on all ranks that read the same data in the same order; None
            if there is nothing to compare.
    """

    data: Any
    size: int
    global_size: int | None
    fingerprint: int | None


def local_range(global_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows `start:stop` of a global batch that belong to a rank.

    The ranks' ranges are contiguous, in rank order, and cover the batch. Their sizes differ by at most one; the first
    ranks have the larger ones. A batch smaller than the world size leaves the last ranks empty.

    >>> [local_range(7, rank, 3) for rank in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    base, extra = divmod(global_size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def batch_size_of(element: Any, source: str) -> int:
    """The number of samples in an element of a source.

    Raises: ConfigurationError if it has no arrays, or scalars, or arrays of different lengths.
    """
    arrays = leaves(element)
    if not arrays:
        raise ConfigurationError(f"{source} yielded a batch without any array: {element!r}.")
    sizes = []
    for array in arrays:
        if array.ndim == 0:
            raise ConfigurationError(
                f"{source} yielded a scalar ({array!r}) where a batch was expected, an array whose first "
                "dimension counts the samples. Call `.batch(batch_size)` on the dataset, or yield arrays; "
                "batch_size is the global batch size, over all replicas."
            )
        sizes.append(int(array.shape[0]))
    if min(sizes) != max(sizes):
        raise ConfigurationError(
            f"{source} yielded a batch whose arrays hold different numbers of samples: {sizes}. "
            "A batch is divided by its first axis, so all of its arrays must have one row for each sample, and the "
            "elements must be batches (of a dataset, after `.batch(batch_size)`). Reshape an array that has several "
            "rows for a sample, or batches of several sizes (zipped data sets), to (samples, rows, ...), and back in "
            "the model."
        )
    return sizes[0]


def make_placeholder(element: Any) -> Any:
    """One sample with the shapes and dtypes of an element, for a rank without a share; zeros if it has no sample."""

    def one(array: Array) -> Array:
        return array[:1] if len(array) else np.zeros((1, *array.shape[1:]), array.dtype)

    return map_leaves(one, element)


def split_share(element: Any, rank: int, world_size: int, source: str, *, copies: bool) -> LocalBatch:
    """Cut a rank's share from an element that all ranks hold in full.

    Args:
        copies: Whether the share holds copies, which is required for arrays that the program may refill.
    """
    global_size = batch_size_of(element, source)
    if global_size == 0:
        raise ConfigurationError(
            f"{source} yielded a batch of 0 samples, which has no loss. Drop empty batches at their source."
        )
    fingerprint = None if world_size == 1 else fingerprint_of(element)  # before the cut: equal on all ranks
    start, stop = local_range(global_size, rank, world_size)
    if start == stop:
        part = make_placeholder(element)
    else:
        part = element if world_size == 1 else map_leaves(lambda array: array[start:stop], element)
    return LocalBatch(map_leaves(_copy, part) if copies else part, stop - start, global_size, fingerprint)


def should_be_aligned(size: int, dtype: np.dtype[Any]) -> bool:
    """Whether a batch of `size` bytes is worth an aligned allocation, which saves the backend another copy."""
    return size >= ALIGNED_FROM_BYTES and dtype.kind in "biuf"


def _copy(array: Array) -> Array:
    return aligned_copy(array) if should_be_aligned(array.nbytes, array.dtype) else array.copy()


def full_share(element: Any, source: str) -> LocalBatch:
    """The share of an element of a per-rank pipeline, which belongs to this rank entirely. No single rank knows the
    global size."""
    size = batch_size_of(element, source)
    return LocalBatch(element if size else make_placeholder(element), size, None, None)


def fingerprint_of(element: Any) -> int:
    """A checksum that differs between ranks if they do not read the same data in the same order.

    It covers the targets if they vary, because augmentation, which may safely differ between ranks, does not change
    them; otherwise the first array.
    """
    _, (x, y, _) = unpack(element)
    for part in (y, x):
        arrays = leaves(part)
        if arrays and (part is x or _rows_differ(arrays[0])):
            return sample_checksum(arrays[0])
    return 0


def sample_checksum(array: Array) -> int:
    """CRC-32 over an array's length and its first FINGERPRINT_BYTES bytes."""
    length = len(array).to_bytes(8, "little")
    if array.dtype.hasobject:
        return zlib.crc32(repr(array[:64].tolist()).encode(), zlib.crc32(length))
    return zlib.crc32(_head(array), zlib.crc32(length))


def _head(array: Array) -> bytes:
    row_bytes = array.nbytes // len(array) if len(array) else 0
    rows = len(array) if row_bytes == 0 else max(1, FINGERPRINT_BYTES // row_bytes)
    return array[:rows].tobytes()[:FINGERPRINT_BYTES]


def _rows_differ(array: Array) -> bool:
    """Whether an array's rows differ, so that a different order changes the checksum."""
    # The first 64 rows: if they are equal, as in data sorted by label, they reveal no order.
    return len(array) > 1 and not array.dtype.hasobject and bool((array[1:64] != array[0]).any())
