"""How the ranks agree on the order of shuffled data: the chief shuffles as Keras does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.data.dataset_elements import Array


@dataclass(frozen=True)
class Shuffling:
    """One `fit`'s agreement on the orders of its passes over the data, seen from one process.

    Attributes:
        is_chief: whether this process decides.
        from_chief: takes this process's numbers, int64, and returns the chief's, of the same shape. Called once when a
            pass begins.
    """

    is_chief: bool
    from_chief: Callable[[Array], Array]
