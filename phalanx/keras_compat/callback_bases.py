"""Base classes of Phalanx's own callbacks, and callbacks as users pass them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


class ChiefCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Base of Phalanx's callbacks that run on the chief alone.

    Attributes:
        saves: whether it may save the model between any two steps.
    """

    saves = False


class BatchListener(keras.callbacks.Callback):  # type: ignore[misc]
    """Base of Phalanx's callbacks that run on every rank and decide nothing."""


def flatten_callbacks(callbacks: Any) -> list[Any]:
    """The callbacks that were passed to a method, as a list."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
