"""Batch normalization over the batches of all ranks: `BatchNormalization(synchronized=True)`, on every backend.

Keras has it on TensorFlow, where it gets the other replicas' sums from `tf.distribute`. On other backends, its layer
refuses the argument. While a rank takes a step, or is in `strategy.run`, the layer gets the sums here instead. Mean and
variance come from two sums over the ranks, one after the other, so no digits are lost. Gradients flow back through
these sums (Ioffe and Szegedy 2015, section 3).

In `strategy.run`, a layer that is not synchronized keeps its statistics if the replica's batch has no samples.

`trainer_hook` patches `BatchNormalization.__init__` and `_moments`. Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from phalanx.keras_compat.global_batch import step_collectives

Sum = Callable[[list[Any]], list[Any]]
"""Sums tensors over the ranks, all in one call, differentiably. All ranks must call it."""


def accepting_synchronized(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Keras's `BatchNormalization.__init__` to accept `synchronized=True` on every backend."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.synchronized = synchronized or self.synchronized

    # Keras reads the signature to write an object's configuration, and does not follow `__wrapped__`.
    vars(method)["__signature__"] = inspect.signature(original)
    return method


def synchronizing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Keras's `BatchNormalization._moments` to reach the other ranks in a step."""

    @functools.wraps(original)
    def method(self: Any, inputs: Any, mask: Any) -> Any:
        collectives = step_collectives.current()
        if collectives is not None and (self.synchronized or collectives.synchronizes_batch_norm):
            return moments(self, inputs, mask, collectives.all_reduce)
        if self.synchronized and keras.backend.backend() != "tensorflow":  # only there, Keras sums over replicas
            return moments(self, inputs, mask, lambda tensors: tensors)
        if collectives is not None and collectives.may_lack_samples and inputs.shape[0] in (0, None):
            return _of_samples(self, inputs, original(self, inputs, mask))
        return original(self, inputs, mask)

    return method


def _of_samples(layer: Any, inputs: Any, computed: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return mean and variance. For a batch without samples, return those that the layer has collected: Keras computes
    NaN, which the layer would keep."""
    has_samples = ops.shape(inputs)[0] > 0
    collected = (layer.moving_mean, layer.moving_variance)
    mean, variance = (
        ops.where(has_samples, of_batch, ops.cast(of_all, of_batch.dtype))
        for of_batch, of_all in zip(computed, collected, strict=True)
    )
    return mean, variance


def moments(layer: Any, inputs: Any, mask: Any, sum_over_ranks: Sum) -> tuple[Any, Any]:
    """Return mean and variance of each feature over all ranks' batches, each of shape (features,).

    Args:
        layer: A built BatchNormalization.
        inputs: Tensor of shape (samples, ...), float32 or wider.
        mask: Tensor of shape `inputs.shape[:-1]` that says which positions count; None: all.
        sum_over_ranks: Sums tensors over the ranks.
    """
    counted = None
    if mask is not None:
        counted = ops.broadcast_to(ops.expand_dims(ops.cast(mask, "bool"), axis=-1), ops.shape(inputs))
    shape = [1] * len(inputs.shape)
    shape[layer.axis] = -1

    def chosen(values: Any) -> Any:
        return values if counted is None else ops.where(counted, values, 0)  # masked values may be NaN

    def per_feature(values: Any) -> Any:
        # The number of features comes from the layer, because that of the inputs may be unknown.
        return ops.reshape(ops.sum(chosen(values), layer._reduction_axes), layer.moving_mean.shape)

    own = per_feature(ops.ones_like(inputs))
    count, total = sum_over_ranks([own, per_feature(inputs)])
    mean = total / ops.maximum(count, 1.0)
    deviations = chosen(inputs - ops.reshape(mean, shape))  # before squaring, or the gradient would be NaN
    # Counted again: a rank that was lost meanwhile has no squares.
    count, squares = sum_over_ranks([own, per_feature(ops.square(deviations))])
    return mean, squares / ops.maximum(count, 1.0)
