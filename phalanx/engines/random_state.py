"""The random state that a backend keeps for the whole process, in addition to Keras's seed generators.

On PyTorch, Keras's dropout without a seed draws from it; JAX and TensorFlow draw from seed generators alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

Array = np.ndarray[Any, Any]

State = list[Array]
"""Of each kind of device, an array of shape (bytes,), uint8; empty if the backend keeps none."""

_NEXT = 2**31
"""No rank, and no micro-batch, has this number."""


def keeps_random_state() -> bool:
    """Whether the backend has such a state."""
    return bool(keras.backend.backend() == "torch")


def random_state() -> State:
    """The present one."""
    if not keeps_random_state():
        return []
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return [np.array(state.numpy()) for state in states]


def set_random_state(state: Sequence[Array]) -> None:
    """Continue from a `random_state`."""
    if not state or not keeps_random_state():
        return
    import torch

    torch.set_rng_state(torch.from_numpy(state[0]))
    if len(state) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state[1]))


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state on exit."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def seed_random_state(numbers: Sequence[int]) -> None:
    """Continue from a state that follows from these numbers, none negative; on a backend that keeps one."""
    import torch

    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
    # Not `torch.manual_seed`, which takes a millisecond to note the seed for devices that are not there.
    torch.default_generator.manual_seed(seed)
    for devices in (torch.cuda, torch.xpu):
        if devices.is_available():
            devices.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def draw_own_numbers(chiefs: Sequence[Array], rank: int) -> None:
    """Set a state that follows from the chief's `random_state` and the rank; without effect on the chief."""
    if chiefs and rank:
        seed_random_state([rank, digest(chiefs)])


def draw_next_numbers(former: Sequence[Array]) -> None:
    """Set the state that follows, on all ranks alike, on `former`, from which each has drawn numbers of its own."""
    draw_own_numbers(former, _NEXT)


def digest(state: Sequence[Array]) -> int:
    """A number of 64 bits that stands for the state of the host; 0 if the backend keeps none."""
    return int.from_bytes(hashlib.blake2b(state[0].tobytes(), digest_size=8).digest(), "big") if state else 0


def differ(state: Sequence[Array], other: Sequence[Array]) -> bool:
    """Whether the states of a kind of device differ that both have: one may have begun to use a GPU since."""
    return any((one != another).any() for one, another in zip(state, other, strict=False))
