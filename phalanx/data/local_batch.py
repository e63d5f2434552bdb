"""One replica's part of one global batch, as training receives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This rank's contiguous part of one global batch.

    Attributes:
        data: `(x, y, sample_weight)`, each a structure of NumPy arrays or None, as Keras unpacks it. If `size` is 0,
            the arrays still hold one sample: a stand-in of the right shapes and dtypes (taken from the global batch)
            that is computed with weight zero.
        size: number of samples in this part, 0 or more.
        global_size: number of samples in the global batch over all ranks, or None if only the ranks
            together know it (per-rank pipelines).
    """

    data: tuple[Any, Any, Any]
    size: int
    global_size: int | None
