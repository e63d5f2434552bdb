"""The random state that a backend keeps for the whole process, beside those of Keras's seed generators.

On PyTorch, Keras's dropout without a seed draws from it; JAX and TensorFlow draw from seed generators alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

Array = np.ndarray[Any, Any]


def random_state() -> list[Array]:
    """This process's, of shape (bytes,), uint8, for each kind of device; nothing where there is no such state."""
    if keras.backend.backend() != "torch":
        return []
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return [np.array(state.numpy()) for state in states]


def set_random_state(of_ranks: Sequence[Sequence[Array]], rank: int) -> None:
    """Draw on as this rank did.

    Args:
        of_ranks: the `random_state` of each rank. One that was not there then draws numbers of its own, which follow
            from the chief's state and the rank.
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
    """Go on with numbers that follow from the chief's `random_state` and the rank; the chief draws on as it is."""
    if not chiefs or not rank:
        return
    import torch  # nowhere else is there such a state

    chiefs_own = chiefs[0]
    seed = np.random.SeedSequence([rank, *chiefs_own.view(np.uint32).tolist()[-16:], *chiefs_own[:64].tolist()])
    torch.manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
