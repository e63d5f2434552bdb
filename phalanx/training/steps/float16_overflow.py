"""Which merged gradients one process would not have, because float16 has no such numbers.

Keras casts the weights of a layer that computes in float16, so one process has their gradients in it. Where the loss
has a dynamic scale, a step whose gradients overflow is skipped, and the scale is halved. Replicas add their parts of a
gradient in float32, which has the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FLOAT16_OVERFLOW = 65520.0
"""From here on, numbers are rounded to infinity in float16."""


class Float16Overflow:
    """Makes sums infinite that are so in float16."""

    def __init__(self) -> None:
        self._weights: frozenset[int] = frozenset()

    def use_weights_of(self, model: Any) -> None:
        """From now on, gradients are those of this model, which is built."""
        self._weights = frozenset(
            id(weight)
            for layer in model._flatten_layers()
            if layer.compute_dtype == "float16" and layer.autocast
            for weight in layer._trainable_variables
            if weight._autocast
        )

    def mark(self, gradients: Iterable[tuple[int, Array]]) -> None:
        """Change merged gradients in place.

        Args:
            gradients: each with the id of its weight.
        """
        for weight, gradient in gradients:
            if weight in self._weights and max(gradient.max(initial=0), -gradient.min(initial=0)) >= FLOAT16_OVERFLOW:
                gradient.fill(np.inf)
