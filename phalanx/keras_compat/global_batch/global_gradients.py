"""Gradients that have the scale of one process while they flow back.

A replica's loss is the mean over fewer samples, so the gradients that flow back through its model are larger than in
one process, by 1 / share. For float32, it is enough to weight the gradients by the share when they are merged. But
float16 overflows, and float8 rounds with scales that follow from the largest values seen. For these, the gradient of
the loss is multiplied by the share, and the gradients are divided by it again before they are merged.

Keras's own training steps pass the loss through `optimizer.scale_loss`, which is overridden while a step runs or is
traced. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.global_batch import step_collectives
from phalanx.keras_compat.global_batch.step_means import share_of_step


def is_overwritten(variable: Any) -> bool:
    """Whether the variable's gradient is its new value (the scales of float8)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def refuse_overwritten(variables: Sequence[Any], where: str) -> None:
    """Raise UnsupportedError if there are such variables, which `where` cannot merge."""
    if any(map(is_overwritten, variables)):
        raise UnsupportedError(
            f"The model has variables that their gradients overwrite (quantize('float8')), which {where} cannot merge. "
            f"Use `fit` with MultiWorkerMirroredStrategy, or another dtype policy."
        )


class GlobalGradients:
    """The loss and the gradients of one optimizer in one step.

    Attributes:
        methods: Methods to override on the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._scale = optimizer.scale_loss
        self._is_scaled = False
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor
        known = getattr(optimizer, "_trainable_variables", None) or ()
        needed = scales or any(map(is_overwritten, known))
        self.methods: dict[str, Callable[..., Any]] = {"scale_loss": self.scale_loss} if needed else {}

    def scale_loss(self, loss: Any) -> Any:
        """Run the optimizer's `scale_loss`. If needed, the gradient of the result is multiplied by the share."""
        scaled = self._scale(loss)
        share = share_of_step()
        if not self.methods or share is None:
            return scaled
        self._is_scaled = True
        if (collectives := step_collectives.current()) is not None:
            collectives.weights_gradients = False  # the gradients are already weighted
        # The result has the value of `scaled`, and 1 + (share - 1) = share times its gradient.
        change = scaled * ops.cast(share - 1.0, scaled.dtype)
        return scaled + (change - ops.stop_gradient(change))  # the value is unchanged: the step may log it

    def to_merge(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients for a merge that weights them by the shares.

        Raises: UnsupportedError if the loss had to be scaled and was not.
        """
        if not self._is_scaled:
            if share_of_step() is not None and any(map(is_overwritten, variables)):
                raise UnsupportedError(
                    "The model has variables that their gradients overwrite (quantize('float8')), and its train_step "
                    "does not pass the loss through optimizer.scale_loss(), where it becomes this replica's part of "
                    "the loss of the global batch. Compute the gradients of optimizer.scale_loss(loss)."
                )
            return list(gradients)
        share = ops.convert_to_tensor(share_of_step(), "float32")
        share = ops.where(share == 0, ops.ones_like(share), share)  # a replica without samples does not count
        return [
            gradient
            if gradient is None or is_overwritten(variable)
            else ops.divide(gradient, ops.cast(share, gradient.dtype))
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
