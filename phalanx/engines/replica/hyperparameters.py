"""Plain numbers in optimizers, which compilation turns into constants.

Keras compiles a whole step, and again for another kind of batch (on JAX, one of another size), so that each kind keeps
the numbers from its first batch. A replica's function depends on its part of the batch, or on none, and is compiled
with the numbers that Keras's would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from phalanx.keras_compat.model_state import PLAIN

NOT_HYPERPARAMETERS = ("built", "_lock")
"""Plain attributes that are not hyperparameters."""


class Hyperparameters:
    """The current plain attributes of optimizers, and of the inner optimizer and schedule of each.

    Args:
        optimizers: Optimizers of a model.

    Attributes:
        key: A key that is equal for equal values of the same objects.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._values = [value for optimizer in optimizers for value in _plain_attributes(optimizer)]
        # By identity of the owners: another schedule object is another trace, even with equal numbers.
        self.key = tuple(
            (id(owner), name, value if isinstance(value, PLAIN) else id(value)) for owner, name, value in self._values
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the objects have these values."""
        # Usually none differ: the optimizer still has the values from the first batch of this kind.
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
            if name not in NOT_HYPERPARAMETERS:
                yield owner, name, value
        elif name == "inner_optimizer":
            yield from _plain_attributes(value)
        elif isinstance(value, LearningRateSchedule):
            yield owner, name, value
            yield from _plain_attributes(value)
        elif name == "_learning_rate" and isinstance(value, keras.Variable):  # a schedule may replace it
            yield owner, name, value
