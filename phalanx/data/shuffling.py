"""Who decides on the order of shuffled data in a job whose members stay: the chief, which shuffles as Keras does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.data.elements import Array


@dataclass(frozen=True)
class Shuffling:
    """One `fit`'s agreement on the orders of its passes over the data, seen from one process.

    Attributes:
        is_chief: whether this process decides.
        peeked: tells, when the first pass begins, whether Keras's own `fit` would have read a batch before it, to build
            the model.
        told: the chief's numbers; each process gives its own, int64 of the same shape. Called once as a pass begins.
    """

    is_chief: bool
    peeked: Callable[[], bool]
    told: Callable[[Array], Array]
