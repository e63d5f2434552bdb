"""Which layers and variables of a model are trainable. Compilation turns these flags into constants.

Keras requires another `compile` after `layer.trainable` has changed. Without it, a step that is already compiled trains
the same weights as before.

Uses `_flatten_layers`, `Layer._trainable` and `Variable._trainable`. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TrainableFlags:
    """The current flags of a model's layers and variables."""

    def __init__(self, model: Any) -> None:
        self._flags = [(each, each._trainable) for each in (*model._flatten_layers(), *model.variables)]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which layers and variables have these flags."""
        others = [(each, flag, each._trainable) for each, flag in self._flags if each._trainable != flag]
        try:
            for each, flag, _ in others:  # not with their setters, which also set the flags of inner objects
                each._trainable = flag
            yield
        finally:
            for each, _, now in others:
                each._trainable = now
