"""Which layers and variables of a model are trainable, which compilation makes constants of.

Keras says to compile again after `layer.trainable` has changed. Without it, a step that is compiled already trains what
it trained before.

Uses `_flatten_layers`, `Layer._trainable` and `Variable._trainable`. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TrainableFlags:
    """The flags of a model's layers and variables as they are now."""

    def __init__(self, model: Any) -> None:
        self._flags = [(each, each._trainable) for each in (*model._flatten_layers(), *model.variables)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, layers and variables have these flags."""
        others = [(each, flag, each._trainable) for each, flag in self._flags if each._trainable != flag]
        try:
            for each, flag, _ in others:  # not by their setters, which set those of what is inside as well
                each._trainable = flag
            yield
        finally:
            for each, _, now in others:
                each._trainable = now
