"""Detection of merged gradients that one process could not have, because they overflow float16.

If a layer computes in float16, Keras casts each weight when the layer uses it, so one process has the gradient of that
use in float16. If the loss has a dynamic scale, a step whose gradients overflow is skipped, and the scale is halved.
Replicas add their parts of a gradient in float32, which can represent the sum.

Keras adds the gradients of several uses of a weight in float32 as well. So only weights are checked that a step is
known to use once: those of Keras's own layers that a functional model calls once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from phalanx.keras_compat.model_state import layers_used_once, overrides

Array = np.ndarray[Any, Any]

FLOAT16_OVERFLOW = 65520.0
"""Smallest number that float16 rounds to infinity."""


class Float16Overflow:
    """Detector that makes sums infinite that would be infinite in float16."""

    def __init__(self) -> None:
        self._weights: frozenset[int] = frozenset()

    def watch_weights(self, model: Any) -> None:
        """Set the model to which the gradients belong from here on; it must be built."""
        is_plain = not any(overrides(model, name) for name in ("train_step", "compute_loss"))
        self._weights = frozenset(
            id(weight)
            for layer in (layers_used_once(model) if is_plain else ())
            if layer.compute_dtype == "float16" and layer.autocast
            for weight in layer._trainable_variables
            if weight._autocast and getattr(weight, "regularizer", None) is None
        )

    def mark_overflows(self, gradients: Iterable[tuple[int, Array]]) -> None:
        """Mark overflows in merged gradients in place.

        Args:
            gradients: Gradients, each with the ID of its weight.
        """
        for weight, gradient in gradients:
            if weight in self._weights and max(gradient.max(initial=0), -gradient.min(initial=0)) >= FLOAT16_OVERFLOW:
                gradient.fill(np.inf)
