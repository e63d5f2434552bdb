"""The contract of a compression: how gradients are summed over the ranks with fewer bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from phalanx.collectives.communicator import Array, Communicator

DType = np.dtype[Any]

State = Mapping[str, Array]
"""What a compression remembers from one step to the next, equal on all ranks. Never changed, only replaced."""


def below(prefix: str, state: State) -> dict[str, Array]:
    """What is named `prefix...`, by the rest of its name."""
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}


class Merged(NamedTuple):
    """What became of a step's arrays.

    Attributes:
        values: the sums over all ranks, float32, in the shapes of the arrays; the same bits on every rank.
        own: what of this rank's arrays has gone into the sums. The rest is lost, or kept as error feedback.
        state: for the next step.
    """

    values: Sequence[Array]
    own: Sequence[Array]
    state: State


class Compression(Protocol):
    """Sums arrays over the ranks, approximately. A value: what changes from step to step is passed in and returned.

    For one of your own, derive from `Codec` if an array becomes something shorter on each rank by itself, which all
    ranks then exchange; implement this protocol where they do more together.
    """

    @property
    def feedback(self) -> bool:
        """Whether what a step lost is kept on each rank and added to the next step's arrays (Karimireddy et al. 2019,
        Error feedback fixes SignSGD and other gradient compression schemes)."""
        ...

    def takes(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """Whether an array is to be compressed. Those that are not are summed as they are."""
        ...

    def all_reduce(self, communicator: Communicator, arrays: Sequence[Array], state: State) -> Merged:
        """Sum each array over all ranks; all ranks call with equal shapes.

        Args:
            arrays: contiguous, float32; not changed.
            state: what the last call returned for arrays of these shapes; empty at first.

        Values that are not finite on any rank must come out as not finite on all: it is how an overflow is found.
        """
        ...
