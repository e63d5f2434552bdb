"""The gradient of a vector of per-sample losses, on this rank's part of a global batch.

`GradientTape.gradient` sums such a vector. The rank's gradients are later weighted by its share of the global batch, so
the sum is divided by that share first. The ranks then have the sum over the global batch.

Patches `tf.GradientTape.gradient`. Tested with TensorFlow 2.21 and Keras 3.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from phalanx.keras_compat.global_batch.global_losses import has_samples
from phalanx.keras_compat.patching import PatchedFunction


class SampleLossGradients(PatchedFunction):
    """A context in which `GradientTape.gradient` treats a vector of per-sample losses in this way.

    Args:
        share: Returns this rank's share of the global batch, a scalar tensor.
        batch_size: Returns the number of samples in this rank's batch; -1 inside a graph, where it is unknown.
    """

    def __init__(self, share: Callable[[], Any], batch_size: Callable[[], int]) -> None:
        super().__init__(tf.GradientTape, "gradient", self._make_gradient())
        self._share = share
        self._batch_size = batch_size

    def _make_gradient(self) -> Callable[..., Any]:
        # A function, not a bound method: as an attribute of the class, it is called with the tape.
        def gradient(
            tape: Any, target: Any, sources: Any, output_gradients: Any = None, *others: Any, **named: Any
        ) -> Any:
            # Each sample's loss receives the gradient 1 / share instead of 1. The merge multiplies by the share again.
            if output_gradients is None and self._sums_samples(target, sources):
                output_gradients = tf.ones_like(target) * tf.cast(
                    tf.math.divide_no_nan(1.0, self._share()), target.dtype
                )
            return self.original(tape, target, sources, output_gradients, *others, **named)

        return gradient

    def _sums_samples(self, target: Any, sources: Any) -> bool:
        """Whether the gradient is a sum over samples, not one per sample's input as in a gradient penalty."""
        return (
            isinstance(target, tf.Tensor)
            and target.shape.rank != 0
            and target.dtype.is_floating
            and all(isinstance(source, tf.Variable | keras.Variable) for source in tf.nest.flatten(sources))
            and (target.shape.rank is None or has_samples(target, self._batch_size()))
        )
