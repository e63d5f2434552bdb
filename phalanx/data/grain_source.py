"""Grain's `MapDataset`, `IterDataset` and `DataLoader`: batched by the program, read by every rank."""

from __future__ import annotations

import sys
from typing import Any

from phalanx.arrays.tree import map_leaves
from phalanx.data.elements import to_numpy
from phalanx.data.source import StreamSource


def grain_source(dataset: Any, *, rank: int, world_size: int) -> StreamSource:
    """A source over a Grain dataset, whose shuffles are always seeded, so that all ranks read the same."""
    kind = f"grain.{_family(dataset)}"
    length = len(dataset) if kind == "grain.MapDataset" else None
    endless = length is not None and length >= sys.maxsize
    if endless:
        length = None
    return StreamSource(
        lambda key: (map_leaves(to_numpy, element) for element in dataset),
        kind=kind,
        rank=rank,
        world_size=world_size,
        num_batches=length,
        uniform=length is not None,
        endless=endless,
    )


def _family(dataset: Any) -> str:
    return next(
        cls.__name__
        for cls in type(dataset).__mro__
        if cls.__name__ in ("MapDataset", "IterDataset", "DataLoader") and "grain" in cls.__module__
    )
