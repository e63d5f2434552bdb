"""Losses whose denominator only all ranks together know.

Most losses are a sum over samples divided by their number: the mean over the ranks, weighted by their shares of the
global batch, is then the loss of the global batch. Three kinds are different: a plain sum, a mean that divides by the
sum of the sample weights, and a mean over what a mask leaves. On each rank such a loss is multiplied by

    a sum:   1 / share
    a mean:  D_r / (D * share)       D_r: this rank's denominator, D: the sum of all ranks'

so that the weighted mean over the ranks is the global loss again: the sum over r of
share_r * (N_r / D_r) * (D_r / (D * share_r)) = N / D. Each loss is scaled by itself, so it works with several outputs
and regularizers, and gradients and logged values follow.

A loss function that returns one number, the mean over the samples, is multiplied by the mean of the batch's sample
weights, which has to be that of the global batch.

Keras computes all these denominators in one function, `keras.src.losses.loss.reduce_weighted_values`, which is patched
while a step runs or is traced, also for losses that an overridden `compute_loss` or `train_step` calls.

Keras sums a vector passed to `add_loss` in `Trainer._aggregate_additional_loss`, which is patched too: with one value
for each sample of the batch it is a sum as well; else (a penalty for each unit) it is the same on all ranks.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops
from keras.src.losses import loss as keras_loss
from keras.src.trainers.trainer import Trainer

from phalanx.keras_compat.patching import PatchedFunction

Denominator = Any
"""A scalar tensor; None for a loss that is a plain sum."""

_DIVIDED = ("sum_over_batch_size", "mean")


class GloballyScaledLosses:
    """A context that multiplies each loss of those kinds by a scale.

    Args:
        scale_of: called with each loss's denominator on this rank, in the order of the losses; returns the scale.

    Attributes:
        batch_size: the number of samples in this rank's batch; -1 if it is unknown.
    """

    def __init__(self, scale_of: Callable[[Denominator | None], Any], batch_size: int = 0) -> None:
        self.batch_size = batch_size
        self._scale_of = scale_of
        self._losses = PatchedFunction(keras_loss, "reduce_weighted_values", self._reduce)
        self._added = PatchedFunction(Trainer, "_aggregate_additional_loss", self._sum)

    def __enter__(self) -> None:
        self._losses.__enter__()
        self._added.__enter__()

    def __exit__(self, *error: object) -> None:
        self._added.__exit__(*error)
        self._losses.__exit__(*error)

    def _reduce(
        self,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        of_samples = sample_weight is not None and len(sample_weight.shape) > 0
        if tuple(values.shape) == () and of_samples and mask is None and reduction in _DIVIDED:
            loss = self._losses.original(values, None, None, reduction, dtype)
            return loss * ops.cast(self._mean_of(ops.cast(sample_weight, "float32")), loss.dtype)
        loss = self._losses.original(values, _to_be_masked(sample_weight, mask), mask, reduction, dtype)
        if tuple(values.shape) == () or not _only_all_know(reduction, sample_weight, mask):
            return loss
        denominator = None if reduction == "sum" else _denominator(values, sample_weight, mask, reduction)
        return loss * ops.cast(self._scale_of(denominator), loss.dtype)

    def _mean_of(self, weights: Any) -> Any:
        """The mean of the sample weights of the global batch."""
        # With D_r the sum of this rank's and their number, which is not 0: D / N = 1 + their mean; share = N_r / N.
        number = ops.cast(ops.size(weights), "float32")
        own = ops.sum(weights) + number
        scale = ops.cast(self._scale_of(own), "float32")  # 0 on a rank without samples
        return own / (number * ops.where(scale == 0, ops.ones_like(scale), scale)) - 1.0

    def _sum(self, added: Any) -> Any:
        total: Any = ops.sum(ops.cast(added, "float32") if "float" not in str(added.dtype) else added)
        if not len(added.shape):
            return total
        scale = ops.cast(self._scale_of(None), total.dtype)  # all ranks call, whatever the lengths there
        return total * scale if has_samples(added, self.batch_size) else total


def has_samples(values: Any, batch_size: int) -> bool:
    """Whether the first axis has one value for each sample of a batch; a batch of unknown size has length None."""
    return len(values.shape) > 0 and values.shape[0] in (None, batch_size)


def _only_all_know(reduction: Any, sample_weight: Any, mask: Any) -> bool:
    if reduction == "mean_with_sample_weight":
        return sample_weight is not None or mask is not None
    return reduction == "sum" or (reduction in _DIVIDED and mask is not None)


def _to_be_masked(sample_weight: Any, mask: Any) -> Any:
    """The weights; a copy where Keras would multiply them in place by the mask."""
    return sample_weight if sample_weight is None or mask is None else ops.copy(sample_weight)


def _denominator(values: Any, sample_weight: Any, mask: Any, reduction: str) -> Any:
    """What Keras divides by in `reduce_weighted_values`; in float32, because half precision can't count beyond 2048."""
    if reduction in _DIVIDED:
        return ops.sum(ops.cast(mask, "float32"))
    values = ops.convert_to_tensor(values)
    weight = None if sample_weight is None else ops.convert_to_tensor(_to_be_masked(sample_weight, mask))
    mask = None if mask is None else ops.convert_to_tensor(mask)
    weight = keras_loss.apply_mask(weight, mask, dtype=values.dtype, reduction=reduction)
    _, weight = keras_loss.squeeze_or_expand_to_same_rank(values, weight)
    return ops.sum(ops.cast(weight, "float32"))
