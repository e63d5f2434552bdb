"""What optimizers hold in plain numbers, which compilation makes constants of.

Keras compiles a whole step, and again for another kind of batches (on JAX, those of another size), so that each kind
keeps the numbers that its first batch found. A replica's function depends on its part of the batch, or on none, and is
compiled with the numbers that Keras's would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from phalanx.keras_compat.model_state import PLAIN

OF_ITS_LIFE = ("built", "_lock")
"""Plain attributes that are no hyperparameters."""


class Hyperparameters:
    """The plain attributes of optimizers, and of the optimizer and the schedule in each, as they are now.

    Args:
        optimizers: of a model.

    Attributes:
        key: equal for equal values of the same objects.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._values = [value for optimizer in optimizers for value in _plain_attributes(optimizer)]
        # By identity of the owners: another schedule object is another trace, even with equal numbers.
        self.key = tuple(
            (id(owner), name, value if isinstance(value, PLAIN) else id(value)) for owner, name, value in self._values
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the objects have these values."""
        # Usually none: the optimizer still has what it had when batches of this kind first came.
        others = [
            (vars(owner), name, value, vars(owner)[name])
            for owner, name, value in self._values
            if vars(owner).get(name, value) is not value
        ]
        try:
            for attributes, name, value, _ in others:
                attributes[name] = value
            yield
        finally:
            for attributes, name, _, now in others:
                attributes[name] = now


def _plain_attributes(owner: Any) -> Iterator[tuple[Any, str, Any]]:
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, PLAIN):
            if name not in OF_ITS_LIFE:
                yield owner, name, value
        elif name == "inner_optimizer":
            yield from _plain_attributes(value)
        elif isinstance(value, LearningRateSchedule):
            yield owner, name, value
            yield from _plain_attributes(value)
        elif name == "_learning_rate" and isinstance(value, keras.Variable):  # where a schedule may come instead of it
            yield owner, name, value
