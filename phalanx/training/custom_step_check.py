"""A check of custom `train_step` methods: one that bypasses the gradient merge lets the replicas diverge."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from phalanx.errors import UnsupportedError
from phalanx.training.replica import Replica

Array = np.ndarray[Any, Any]

SAMPLED = 64
"""Number of values that are compared of each variable."""
TOLERANCE, NOISE = 0.05, 1e-5
"""Relative to the change, and to the values: hosts with different processors round differently."""


class CustomStepCheck:
    """Compares over the replicas what a step has changed in the weights. Create it before the step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before = _sample(model)

    def compare(self, replica: Replica) -> bool:
        """Compare; every rank must call it after the step. Returns False if there was nothing to compare, because the
        step has created the variables.

        Raises: UnsupportedError where the replicas' weights have changed differently.
        """
        after = _sample(self._model)
        if not after.size or after.size != self._before.size:
            return False
        change = after - self._before
        changes = np.stack(replica.communicator.all_gather(change[None])).reshape(-1, change.size)
        differs = np.abs(changes - changes[0]).mean()
        if differs > TOLERANCE * np.abs(changes).mean() + NOISE * np.abs(after).mean():
            raise UnsupportedError(
                f"The train_step of {type(self._model).__name__} updates weights with gradients that are not merged: "
                f"after one step the replicas' weights differ. Update them with a Keras optimizer (`apply`, "
                f"`apply_gradients`), whose gradients are merged; or train in a custom loop with "
                f"strategy.reduce('MEAN', gradients)."
            )
        return True


def _sample(model: Any) -> Array:
    parts = [np.zeros(0)]
    for variable in model.trainable_variables:
        flat = np.asarray(keras.ops.convert_to_numpy(variable.value)).reshape(-1)
        parts.append(flat[:: max(1, flat.size // SAMPLED)].astype(np.float64))
    return np.concatenate(parts)
