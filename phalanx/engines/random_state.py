"""The random state that a backend keeps for the whole process, in addition to Keras's seed generators.

On PyTorch, Keras's dropout without a seed draws from it. JAX and TensorFlow draw from seed generators alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

Array = np.ndarray[Any, Any]

State = list[Array]
"""For each kind of device, an array of shape (bytes,), uint8; empty if the backend keeps none."""

_SHARED_STREAM = 2**31
"""A number that no rank and no micro-batch has."""


def keeps_random_state() -> bool:
    """Whether the backend has such a state."""
    return bool(keras.backend.backend() == "torch")


def random_state() -> State:
    """Return the current random state."""
    if not keeps_random_state():
        return []
    import torch

    states = [torch.get_rng_state(), *(each.get_rng_state() for each in _accelerators())]
    return [np.array(state.numpy()) for state in states]


def set_random_state(state: Sequence[Array]) -> None:
    """Continue from a `random_state`."""
    if not state or not keeps_random_state():
        return
    import torch

    torch.set_rng_state(torch.from_numpy(state[0]))
    for accelerator, each in zip(_accelerators(), state[1:], strict=False):
        accelerator.set_rng_state(torch.from_numpy(each))


def seed_random_state(seed: int) -> None:
    """Continue from a state that follows from a 63-bit seed, on the devices that `random_state` covers."""
    if not keeps_random_state():
        return
    import torch

    # Not `torch.manual_seed`, which takes a millisecond to record the seed for devices that do not exist.
    torch.default_generator.manual_seed(seed)
    for accelerator in _accelerators():
        accelerator.manual_seed(seed)


def _accelerators() -> list[Any]:
    """Return PyTorch's modules for the kinds of devices in use, each with the generator of its current device."""
    import torch

    found: list[Any] = [each for each in (torch.cuda, torch.xpu) if each.is_available() and each.is_initialized()]
    return [*found, *([torch.mps] if torch.backends.mps.is_available() else [])]


def seed_from_rank(chiefs: Sequence[Array], rank: int) -> None:
    """Set a state that follows from the chief's `random_state` and the rank. No effect on the chief."""
    if chiefs and rank:
        seed_random_state(hash_of(rank, digest(chiefs)))


def advance_shared_state(former: Sequence[Array]) -> None:
    """Set the state that follows `former`, the same on all ranks, after each has drawn its own numbers from it."""
    seed_from_rank(former, _SHARED_STREAM)


def digest(state: Sequence[Array]) -> int:
    """Return a 63-bit number that identifies the state of the host."""
    return hash_of(state[0].tobytes())


def hash_of(*parts: int | bytes) -> int:
    """Return a 63-bit number that follows from these, the same in each process."""
    content = b" ".join(part if isinstance(part, bytes) else b"%d" % part for part in parts)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


def states_differ(state: Sequence[Array], other: Sequence[Array]) -> bool:
    """Whether the states differ for a kind of device that both have. One may have started to use a GPU since."""
    return any((one != another).any() for one, another in zip(state, other, strict=False))
