"""The random state that a program draws from: with the chief's it is the same on all tasks, also without a seed.

Of Python's `random`, from which Keras draws the seeds of initializers; of NumPy's, from which programs make and split
data; and of PyTorch's, where it is imported, from which its loaders and splits draw whichever backend Keras runs on.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import msgspec
import numpy as np

from phalanx.transport.decoding import decode_message


def random_state() -> bytes:
    """This process's."""
    numpys: Any = np.random.get_state(legacy=True)
    torch = sys.modules.get("torch")
    state = (
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in numpys],
        None if torch is None else torch.get_rng_state().numpy().tobytes(),
    )
    return msgspec.msgpack.encode(state)


def set_random_state(state: bytes) -> None:
    """Draw on as the process whose `random_state` this is."""
    (version, numbers, gauss), numpys, torchs = decode_message(state)
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(numpys))
    torch = sys.modules.get("torch")
    if torch is not None and torchs is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))
