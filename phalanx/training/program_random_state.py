"""The random state that a program draws from: with the chief's it is the same on all tasks, also without a seed.

Of Python's `random`, from which Keras draws the seeds of initializers; of NumPy's, from which programs make and split
data; and of PyTorch's, where it is imported, from which its loaders and splits draw whichever backend Keras runs on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from phalanx.transport.decoding import decode_message

States = tuple[Any, Any, bytes | None]
"""Of `random`, of `np.random`, and of PyTorch; None if that is not imported."""


def states() -> States:
    """Those of this process, which can be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    torch = sys.modules.get("torch")
    return (
        random.getstate(),
        (name, np.asarray(keys).tobytes(), *rest),
        None if torch is None else torch.get_rng_state().numpy().tobytes(),
    )


def set_states(states: States) -> None:
    """Continue from them."""
    of_python, (name, keys, *rest), of_torch = states
    random.setstate(of_python)
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    torch = sys.modules.get("torch")
    if torch is not None and of_torch is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


@contextmanager
def kept() -> Iterator[None]:
    """Restore the states on exit."""
    before = states()
    try:
        yield
    finally:
        set_states(before)


def seed(numbers: Sequence[int]) -> None:
    """Continue from states that follow from these numbers, none negative."""
    words = np.random.SeedSequence(numbers).generate_state(3, np.uint64)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]) & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(int(words[2]) >> 1)


def random_state() -> bytes:
    """The states, encoded."""
    return msgspec.msgpack.encode(states())


def set_random_state(state: bytes) -> None:
    """Draw on as the process whose `random_state` this is."""
    (version, numbers, gauss), of_numpy, of_torch = decode_message(state)
    set_states(((version, tuple(numbers), gauss), of_numpy, of_torch))
