"""What an optimizer holds in plain numbers, which compilation makes constants of.

Keras compiles a whole step, and again for a batch of another size, so that each size keeps the numbers that its first
batch found. A replica's update does not depend on the batch, and is compiled again only for other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keras.optimizers.schedules import LearningRateSchedule

PLAIN = (int, float, bool, str, type(None))


class Hyperparameters:
    """The plain attributes of an optimizer, and of the optimizer and the schedule in it, as they are now.

    Attributes:
        key: equal for equal values of the same objects.
    """

    def __init__(self, optimizer: Any) -> None:
        self._values = list(_plain_attributes(optimizer))
        # By identity of the owners: another schedule object is another trace, even with equal numbers.
        self.key = tuple((id(owner), name, value) for owner, name, value in self._values)

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
            yield owner, name, value
        elif name == "inner_optimizer":
            yield from _plain_attributes(value)
        elif isinstance(value, LearningRateSchedule):
            yield owner, name, value
            yield from _plain_attributes(value)
