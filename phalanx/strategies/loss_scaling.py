"""Losses of custom loops, scaled so that the sum over replicas is the mean over the global batch.

In a step of `fit`, which averages gradients over the replicas weighted by their shares of the batch, losses are scaled
so that this average is the mean.
"""

from __future__ import annotations

from typing import Any

import keras

from phalanx.errors import ConfigurationError
from phalanx.keras_compat.global_batch.step_means import share_of_step
from phalanx.strategies import replica_context


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
    """The sum of this replica's losses, divided by the global batch size (`tf.nn.compute_average_loss`).

    Args:
        per_example_loss: Losses of shape (local batch, ...). The losses of one example (its pixels, its words) are
            summed: pass their mean if you want the mean.
        sample_weight: Weight of each example, or of each of its losses.
        global_batch_size: Size of the batch over all replicas. None: the local size times the number of replicas, which
            is wrong for uneven batches.

    Returns: 0 for a batch without examples.
    Raises: ConfigurationError for a scalar: a loss computes the mean of one replica's batch only.
    """
    losses = keras.ops.convert_to_tensor(per_example_loss)
    if keras.ops.ndim(losses) == 0:
        raise ConfigurationError(
            "compute_average_loss() got a scalar; it needs the loss of each example, shape (local batch, ...). Do not "
            "take the mean: keras.losses.MeanSquaredError(reduction=None) gives one loss for each example."
        )
    if sample_weight is not None:
        losses = losses * _squeeze_or_expand_weights(keras.ops.cast(sample_weight, losses.dtype), losses)
    if global_batch_size is None:
        divisor = keras.ops.cast(keras.ops.shape(losses)[0] * _summed_replicas(), losses.dtype)
    else:
        divisor = keras.ops.cast(global_batch_size, losses.dtype)
        # `fit` multiplies gradients by this replica's share of the batch; divide by that factor here.
        if (share := share_of_step()) is not None:
            divisor *= keras.ops.cast(share, losses.dtype)
    return keras.ops.divide_no_nan(keras.ops.sum(losses), divisor)


def _squeeze_or_expand_weights(weights: Any, losses: Any) -> Any:
    """The weights with as many axes as the losses; the leading axes match."""
    missing = keras.ops.ndim(losses) - keras.ops.ndim(weights)
    if missing == -1 and weights.shape[-1] == 1:
        return keras.ops.squeeze(weights, -1)
    for _ in range(missing if keras.ops.ndim(weights) else 0):
        weights = keras.ops.expand_dims(weights, -1)
    return weights


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Divide a regularization loss by the number of replicas over which it will be summed
    (`tf.nn.scale_regularization_loss`)."""
    return keras.ops.sum(keras.ops.convert_to_tensor(regularization_loss)) / _summed_replicas()


def _summed_replicas() -> int:
    """The number of replicas over which losses will be summed."""
    if share_of_step() is not None:
        return 1
    strategy = replica_context.owning_strategy()
    # One program computes the losses of the whole batch.
    return 1 if strategy is None or strategy.placement is not None else strategy.num_replicas_in_sync
