"""What a program passed to `fit`, `evaluate` or `predict`, and which rank of the job reads it."""

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
    """One `fit`'s agreement on the orders of its passes over shuffled data, seen from one process: the chief shuffles
    as Keras does.

    Attributes:
        is_chief: Whether this process decides.
        from_chief: Takes this process's numbers, int64, and returns the chief's, of the same shape. Called once when a
            pass begins.
    """

    is_chief: bool
    from_chief: Callable[[Array], Array]


@dataclass(frozen=True, slots=True, eq=False)
class InputRequest:
    """An input of `fit`, `evaluate` or `predict`, and the rank that reads it; fields of Keras mean what they do there.

    Attributes:
        x, y, sample_weight: as for `Model.fit`.
        batch_size: The global batch size, over all ranks together, as is a dataset's own batch size.
        steps_per_epoch: As for `Model.fit`.
        shuffle: For arrays and PyDatasets, as in Keras. Ignored for datasets that shuffle themselves.
        class_weight: As for `Model.fit`.
        rank, world_size: this rank, and how many there are.
        is_read_by_all: Whether other processes read as this rank, too, and must get the same.
        seed: Equal on all ranks.
        shuffling: For arrays, PyDatasets and map-style DataLoaders: how the ranks agree on the orders of the passes.
            None: these depend on `seed` and the epoch alone, and so are the same on all ranks.
        steps_per_execution: Batches that Keras takes at once; see `InputPosition`.
        repeated: Of a generator, see `StreamCursor`.
        opens_as_keras: Whether it opens one pass more than it reads, where Keras's `fit` does.
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
    repeated: int = data_adapters.NUM_BATCHES_FOR_SHAPES
    opens_as_keras: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(f"rank must be 0 to world_size - 1; got rank {self.rank} of {self.world_size}.")
        if self.class_weight is not None and self.sample_weight is not None:
            raise ConfigurationError(TWO_WEIGHTS)
