"""The input that a program passed to `fit`, `evaluate` or `predict`, and the rank that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.data.dataset_elements import Array
from phalanx.errors import ConfigurationError
from phalanx.keras_compat import data_adapters

TWO_WEIGHTS = "You cannot specify `class_weight` and `sample_weight` at the same time."


@dataclass(frozen=True)
class OrderAgreement:
    """Agreement of the processes in a `fit` on the orders of passes over shuffled data: the chief shuffles as Keras
    does.

    Attributes:
        is_chief: Whether this process decides.
        from_chief: Function that takes this process's numbers, int64, and returns the chief's, with the same shape.
            Called once when a pass begins.
    """

    is_chief: bool
    from_chief: Callable[[Array], Array]


@dataclass(frozen=True, slots=True, eq=False)
class InputRequest:
    """An input of `fit`, `evaluate` or `predict`, and the rank that reads it.

    Attributes:
        x, y, sample_weight: See `Model.fit`.
        batch_size: The global batch size over all ranks, like the batch size of a dataset.
        steps_per_epoch: See `Model.fit`.
        shuffle: Value for arrays and PyDatasets, as in Keras. Ignored for datasets that shuffle themselves.
        class_weight: See `Model.fit`.
        rank, world_size: This rank, and the number of ranks.
        is_read_by_all: Whether other processes also read as this rank, and must get the same data.
        seed: Seed, equal on all ranks.
        shuffling: Agreement of the ranks on the orders of passes over arrays, PyDatasets and map-style DataLoaders.
            None: orders depend only on `seed` and the epoch, so they are equal on all ranks.
        steps_per_execution: Number of batches that Keras takes at once; see `InputPosition`.
        replayed: Number of elements of a generator that begin each pass; see `StreamCursor`.
        opens_as_keras: Whether to open one more pass than is read if Keras's `fit` does.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    steps_per_epoch: int | None = None
    shuffle: bool | str = False
    class_weight: dict[int, float] | None = None
    rank: int = 0
    world_size: int = 1
    is_read_by_all: bool = False
    seed: int = 0
    shuffling: OrderAgreement | None = None
    steps_per_execution: int = 1
    replayed: int = data_adapters.NUM_BATCHES_FOR_SHAPES
    opens_as_keras: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(f"rank must be 0 to world_size - 1; got rank {self.rank} of {self.world_size}.")
        if self.class_weight is not None and self.sample_weight is not None:
            raise ConfigurationError(TWO_WEIGHTS)
