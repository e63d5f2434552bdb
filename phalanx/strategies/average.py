"""Losses of custom loops, scaled so that the sum over replicas is the mean over the global batch."""

from __future__ import annotations

from typing import Any

import keras

from phalanx.strategies import context


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
    """The sum of this replica's losses over the global batch size (`tf.nn.compute_average_loss`).

    Args:
        per_example_loss: shape (local batch, ...); every element counts as an example.
        sample_weight: broadcast against it.
        global_batch_size: over all replicas. None: the local size times the number of replicas, which is wrong for
            uneven batches.
    """
    losses = keras.ops.convert_to_tensor(per_example_loss)
    if sample_weight is not None:
        losses = losses * keras.ops.cast(sample_weight, losses.dtype)
    if global_batch_size is None:
        size = keras.ops.cast(keras.ops.size(losses), losses.dtype) * _replicas()
    else:
        size = keras.ops.cast(global_batch_size, losses.dtype)
    return keras.ops.sum(losses) / size


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """A regularization loss, divided by the number of replicas, over which it will be summed
    (`tf.nn.scale_regularization_loss`)."""
    return keras.ops.sum(keras.ops.convert_to_tensor(regularization_loss)) / _replicas()


def _replicas() -> int:
    strategy = context.current_strategy()
    return 1 if strategy is None else strategy.num_replicas_in_sync
