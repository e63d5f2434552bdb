"""The random state that a backend keeps for the whole process, in addition to Keras's seed generators.

On PyTorch, Keras's dropout without a seed draws from it; JAX and TensorFlow draw from seed generators alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

Array = np.ndarray[Any, Any]

_NEXT = 2**31
"""No rank, and no micro-batch, has this number."""


def random_state() -> list[Array]:
    """The state of each kind of device, of shape (bytes,), uint8; empty if the backend keeps none."""
    if keras.backend.backend() != "torch":
        return []
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return [np.array(state.numpy()) for state in states]


def set_random_state(of_ranks: Sequence[Sequence[Array]], rank: int) -> None:
    """Restore the random state of this rank.

    Args:
        of_ranks: the `random_state` of each rank. A rank that is not among them gets a new state, which follows from
            the chief's state and the rank.
        rank: of this process.
    """
    if not of_ranks or not of_ranks[0] or keras.backend.backend() != "torch":
        return
    import torch

    if rank < len(of_ranks):
        states = of_ranks[rank]
        torch.set_rng_state(torch.from_numpy(states[0]))
        if len(states) > 1 and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.from_numpy(states[1]))
        return
    draw_own_numbers(of_ranks[0], rank)


def draw_own_numbers(chiefs: Sequence[Array], rank: int) -> None:
    """Set a state that follows from the chief's `random_state` and the rank; without effect on the chief."""
    if not chiefs or not rank:
        return
    import torch  # nowhere else is there such a state

    chiefs_own = chiefs[0]
    words = np.concatenate([[rank], chiefs_own.view(np.uint32)[-16:], chiefs_own[:64]]).astype(np.uint32)
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
    # Not `torch.manual_seed`, which takes a millisecond to note the seed for devices that are not there.
    torch.default_generator.manual_seed(seed)
    for devices in (torch.cuda, torch.xpu):
        if devices.is_available():
            devices.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def draw_next_numbers(former: Sequence[Array]) -> None:
    """Set the state that follows, on all ranks alike, on `former`, from which each has drawn numbers of its own."""
    draw_own_numbers(former, _NEXT)


def differ(state: Sequence[Array], other: Sequence[Array]) -> bool:
    """Whether the states of a kind of device differ that both have: one may have begun to use a GPU since."""
    return any((one != another).any() for one, another in zip(state, other, strict=False))
