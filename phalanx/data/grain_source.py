"""Grain's `MapDataset`, `IterDataset` and `DataLoader`: batched by the program, read by every rank."""

from __future__ import annotations

import sys

from phalanx.arrays.tree import map_leaves
from phalanx.data.dataset_elements import to_numpy
from phalanx.data.input_request import InputRequest
from phalanx.data.source import SourceTraits, StreamSource


def make_source(request: InputRequest) -> StreamSource:
    """Create the source of a Grain dataset, whose shuffles are always seeded, so that all ranks read the same data."""
    dataset = request.x
    classes = [cls.__name__ for cls in type(dataset).__mro__ if "grain" in cls.__module__]
    family = next(name for name in classes if name in ("MapDataset", "IterDataset", "DataLoader"))
    length = len(dataset) if family == "MapDataset" else None
    is_endless = length is not None and length >= sys.maxsize
    if is_endless:
        length = None
    kind = f"grain.{family}"
    return StreamSource(
        lambda key: (map_leaves(to_numpy, element) for element in dataset),
        SourceTraits(kind, signature=kind, is_uniform=length is not None, is_endless=is_endless),
        request,
        num_batches=length,
    )
