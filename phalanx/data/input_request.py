"""What a program passed to `fit`, `evaluate` or `predict`, and which rank of the job reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.data.shuffling import Shuffling


@dataclass(frozen=True, slots=True, eq=False)
class InputRequest:
    """One input of one rank; see `shard_input` for what each field means."""

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
    shuffling: Shuffling | None = None
    policy: AutoShardPolicy | None = None
    repeated: int = 0  # of a generator, see `StreamCursor`
    opens_as_keras: bool = True  # whether it opens one pass more than it reads, where Keras's `fit` does
