"""The random state that a program draws from: set to the chief's, it is the same on all tasks, even without a seed.

It comprises Python's `random`, from which Keras draws the seeds of initializers; NumPy's, with which programs create
and split data; and PyTorch's, if imported, from which its loaders and splits draw whichever backend Keras runs on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from phalanx.engines.random_state import hash_of
from phalanx.transport.decoding import decode_message

States = tuple[Any, Any, bytes | None]
"""States of `random`, `np.random` (None if the program replaced its bit generator), and PyTorch (None if absent)."""

_WORDS = 16
"""Number of words of a Mersenne Twister that, with the position in it, identify its state."""


def states() -> States:
    """Return the states of this process."""
    torch = sys.modules.get("torch")
    return (
        random.getstate(),
        np.random.get_state(legacy=True) if _is_mersenne_twister() else None,
        None if torch is None else torch.get_rng_state().numpy().tobytes(),
    )


def restore_states(states: States) -> None:
    """Continue from these states."""
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    if of_numpy is not None and _is_mersenne_twister():
        np.random.set_state(of_numpy)
    torch = sys.modules.get("torch")
    if torch is not None and of_torch is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


@contextmanager
def restored_on_exit() -> Iterator[None]:
    """Restore the states on exit."""
    before = states()
    try:
        yield
    finally:
        restore_states(before)


def digests() -> list[int]:
    """Return three 63-bit numbers that identify the states."""
    (_, words, _), of_numpy, of_torch = states()
    numpys = 0 if of_numpy is None else hash_of(of_numpy[1][:_WORDS].tobytes(), int(of_numpy[2]))
    return [hash_of(words[-1], *words[:_WORDS]), numpys, hash_of(of_torch or b"")]


def seed(seeds: Sequence[int]) -> None:
    """Continue from states derived from three 63-bit seeds, one for each generator."""
    of_python, of_numpy, of_torch = seeds
    random.seed(of_python)
    if _is_mersenne_twister():
        np.random.seed(of_numpy & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(of_torch)


def encode_random_state() -> bytes:
    """Return the encoded states."""
    of_python, of_numpy, of_torch = states()
    if of_numpy is not None:
        name, words, *place = of_numpy
        of_numpy = [name, np.asarray(words).tolist(), *place]
    return msgspec.msgpack.encode((of_python, of_numpy, of_torch))


def restore_random_state(encoded: bytes) -> None:
    """Restore encoded states: continue drawing like the process that called `encode_random_state`."""
    (version, words, gauss), of_numpy, of_torch = decode_message(encoded)
    restore_states(((version, tuple(words), gauss), None if of_numpy is None else tuple(of_numpy), of_torch))


def _is_mersenne_twister() -> bool:
    return isinstance(np.random.get_bit_generator(), np.random.MT19937)  # type: ignore[attr-defined]
