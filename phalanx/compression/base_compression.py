"""The interface of a compression, which sums gradients over the ranks with fewer bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from phalanx.collectives.communicator import Array, Communicator

DType = np.dtype[Any]

State = Mapping[str, Array]
"""State that a compression keeps between steps, equal on all ranks. Never modified, only replaced."""


def strip_prefix(prefix: str, state: State) -> dict[str, Array]:
    """Select the arrays whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}


class Merged(NamedTuple):
    """The result of a compressed all-reduce.

    Attributes:
        values: Sums over all ranks, float32, with the shapes of the arrays; equal to the last bit on all ranks.
        own: The part of this rank's arrays that the sums contain. The rest is lost, or kept as error feedback.
        state: State for the next step.
    """

    values: Sequence[Array]
    own: Sequence[Array]
    state: State


class Compression(Protocol):
    """Sums arrays over the ranks approximately. Immutable: state is passed in and returned.

    To write a custom one, derive from `Codec` if each rank can encode its arrays independently. Implement this protocol
    if encoding needs communication.
    """

    @property
    def feedback(self) -> bool:
        """Whether each rank keeps the error of a step and adds it to the next step's arrays (Karimireddy et al. 2019,
        Error feedback fixes SignSGD and other gradient compression schemes)."""
        ...

    def takes(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """Whether to compress arrays of this shape and dtype. Other arrays are summed without compression."""
        ...

    def all_reduce(self, communicator: Communicator, arrays: Sequence[Array], state: State) -> Merged:
        """Sum each array over all ranks. All ranks must call this with equal shapes.

        Args:
            communicator: Communicator of the ranks.
            arrays: Contiguous float32 arrays; not modified.
            state: State that the last call returned for arrays of these shapes; empty at first.

        A value that is not finite on some rank must not be finite in the result on any rank, so that an overflow is
        detected.
        """
        ...
