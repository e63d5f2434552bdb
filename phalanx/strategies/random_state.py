"""The random state that a program draws from: with the chief's it is the same on all tasks, also without a seed.

Of Python's `random`, from which Keras draws the seeds of initializers, and of NumPy's, from which programs make and
split data.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np


def random_state() -> bytes:
    """This process's."""
    numpys: Any = np.random.get_state(legacy=True)
    state = (random.getstate(), [part.tolist() if isinstance(part, np.ndarray) else part for part in numpys])
    return msgspec.msgpack.encode(state)


def set_random_state(state: bytes) -> None:
    """Draw on as the process whose `random_state` this is."""
    (version, numbers, gauss), numpys = msgspec.msgpack.decode(state)
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(numpys))
