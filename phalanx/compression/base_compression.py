"""The contract of a compression: how gradients are summed over the ranks with fewer bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from phalanx.collectives.communicator import Array, Communicator

DType = np.dtype[Any]

State = Mapping[str, Array]
"""What a compression keeps from one step to the next, equal on all ranks. Never changed, only replaced."""


def strip_prefix(prefix: str, state: State) -> dict[str, Array]:
    """The arrays whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}


class Merged(NamedTuple):
    """The result of a compressed all-reduce.

    Attributes:
        values: The sums over all ranks, float32, in the shapes of the arrays; the same bits on every rank.
        own: This rank's arrays as far as they are contained in the sums. The rest is lost, or kept as error feedback.
        state: The state for the next step.
    """

    values: Sequence[Array]
    own: Sequence[Array]
    state: State


class Compression(Protocol):
    """Sums arrays over the ranks approximately. Immutable: state is passed in and returned.

    To write your own, derive from `Codec` if each rank can encode its arrays alone. Implement this protocol if the
    ranks must do more together.
    """

    @property
    def feedback(self) -> bool:
        """Whether each rank keeps what a step lost and adds it to the next step's arrays (Karimireddy et al. 2019,
        Error feedback fixes SignSGD and other gradient compression schemes)."""
        ...

    def takes(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """Whether to compress an array of this shape and dtype. Other arrays are summed without compression."""
        ...

    def all_reduce(self, communicator: Communicator, arrays: Sequence[Array], state: State) -> Merged:
        """Sum each array over all ranks; all ranks call with equal shapes.

        Args:
            communicator: The ranks.
            arrays: Contiguous float32 arrays; not modified.
            state: What the last call returned for arrays of these shapes; empty at first.

        A value that is not finite on any rank must not be finite in the result of all ranks: that is how an overflow is
        found.
        """
        ...
