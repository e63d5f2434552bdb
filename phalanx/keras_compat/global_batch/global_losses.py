"""Losses whose denominator only all ranks together can compute.

Most losses are a sum over samples divided by their number. The mean over the ranks, weighted by their shares of the
global batch, is then the loss of the global batch. Three kinds are different: a plain sum, a mean that divides by the
sum of the sample weights, and a mean over the entries that a mask keeps. Each rank's part of such a loss is

    a sum:   N_r / share_r
    a mean:  N_r / (D * share_r)       N_r: this rank's sum, D: the sum of all ranks' denominators

so that the weighted mean over the ranks is again the global loss, N / D, even if the weights of a rank sum to zero or
less. It holds for each loss by itself, so it works with several outputs and regularizers, and gradients and logged
values follow.

A loss function that returns one number, the mean over the samples, is multiplied by the mean of the sample weights,
which must be the mean over the global batch.

Keras computes all these denominators in one function, `keras.src.losses.loss.reduce_weighted_values`. It is patched
while a step runs or is traced, also for losses that an overridden `compute_loss` or `train_step` calls.

A loss that relates the samples of a batch to each other is not a sum over ranks at all. For the losses of this kind in
Keras, targets, predictions and weights are gathered, and each rank computes the whole loss.
`phalanx.losses.OverGlobalBatch` does the same for others.

Keras sums a vector passed to `add_loss` in `Trainer._aggregate_additional_loss`, which is patched too. A vector with
one value per sample of the batch is a sum as well. Any other (a penalty per unit) is the same on all ranks.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
from keras import losses as keras_losses
from keras import ops, tree
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.trainer import Trainer

from phalanx.keras_compat.global_batch import step_collectives
from phalanx.keras_compat.global_batch.step_means import is_in_step, share_of_step
from phalanx.keras_compat.patching import PatchedFunction, set_untracked

# Reductions that divide by the number of values, or of those that a mask keeps. Each rank's share of it is known.
_MEAN_REDUCTIONS = ("sum_over_batch_size", "mean")


_COUPLES_LAST_AXIS = ("cosine_similarity", "kl_divergence", "pearson_correlation", "concordance_correlation")
"""Functions that relate values, in addition to the categorical ones. Keras's others are means along that axis."""


class _GlobalLossDepth(threading.local):
    """Number of losses of the global batch that this thread is computing, on each rank."""

    value = 0


_global_loss_depth = _GlobalLossDepth()


# Stored on the objects, because PyTorch's compiler does not support sets of weak references.


def mark_as_sum(thing: Any, *, is_sum: bool = True) -> None:
    """Record on a loss, or on a model for its `compute_loss`, whether it is one sum over the batch."""
    set_untracked(thing, _phalanx_is_sum=is_sum)


def is_marked_as_sum(thing: Any) -> bool:
    """Return what `mark_as_sum` recorded."""
    return getattr(thing, "_phalanx_is_sum", False)


def mark_added_losses(layer: Any, kinds: Sequence[bool | None]) -> None:
    """Record for each loss that a layer adds in one call of the model whether it is a sum; None if unknown."""
    set_untracked(layer, _phalanx_added=tuple(kinds))


def over_global_batch(loss: Callable[..., Any], y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Compute a loss over the batches of all ranks; outside of a step, over this batch."""
    collectives = step_collectives.current()
    if collectives is None or _global_loss_depth.value:
        return _compute_globally(loss, y_true, y_pred, sample_weight)

    def gathered(values: Any) -> Any:
        tensors = [ops.convert_to_tensor(leaf) for leaf in tree.flatten(values) if leaf is not None]
        rows = iter(collectives.all_gather(tensors) if tensors else ())
        return tree.map_structure(lambda leaf: None if leaf is None else next(rows), values)

    # Gathered separately: targets need no gradient, and it would be sent.
    masks = tree.map_structure(get_keras_mask, y_pred)
    y_true, sample_weight, masks = gathered((y_true, sample_weight, masks))
    y_pred = gathered(y_pred)
    tree.map_structure(lambda each, mask: mask is None or set_keras_mask(each, mask), y_pred, masks)
    return _compute_globally(loss, y_true, y_pred, sample_weight)


def is_over_global_batch() -> bool:
    """Whether a loss of the global batch is being computed."""
    return _global_loss_depth.value > 0


def _compute_globally(loss: Callable[..., Any], *arguments: Any) -> Any:
    _global_loss_depth.value += 1
    try:
        return loss(*arguments)
    finally:
        _global_loss_depth.value -= 1


def couples_samples(loss: Any, y_pred: Any) -> bool:
    """Whether this is a Keras loss that is known to relate samples to each other."""
    function, arguments = getattr(loss, "fn", None), getattr(loss, "_fn_kwargs", {})
    if not (getattr(function, "__module__", None) or "").startswith("keras."):
        return False
    # Several outputs with one compiled loss for all are stacked; the samples are then the second axis.
    rank = max(len(getattr(each, "shape", ())) for each in tree.flatten(y_pred))  # a custom step may pass a number
    if "axis" not in arguments:
        return function is keras_losses.circle or (rank == 1 and couples_last_axis(function))
    axes, first = arguments["axis"], {int(tree.is_nested(y_pred)), -rank}  # None: all of them
    return axes is None or not first.isdisjoint(axes if isinstance(axes, tuple | list) else (axes,))


def couples_last_axis(function: Any) -> bool:
    """Whether a Keras loss or metric function relates the values along the last axis to each other. For outputs of
    shape (samples,), these are samples."""
    name = getattr(function, "__name__", "")
    return "categorical" in name or name in _COUPLES_LAST_AXIS


class GloballyScaledLosses:
    """A context inside a step (`step_collectives`, `step_means`) in which such losses are this rank's part of the
    global loss.

    Attributes:
        batch_size: Number of samples in this rank's batch; -1 if unknown.
    """

    def __init__(self, batch_size: int = 0) -> None:
        self.batch_size = batch_size
        # By id of the layer: how many losses it has added. Each step or trace clears it. `_phalanx_added` has their
        # kinds in this order, repeated for each call.
        self._added_so_far: Counter[int] = Counter()
        self._losses = PatchedFunction(keras_loss, "reduce_weighted_values", self._reduce)
        self._computes = PatchedFunction(Trainer, "_compute_loss", self._make_compute())
        self._adds = PatchedFunction(keras.layers.Layer, "add_loss", self._make_add())
        self._calls = PatchedFunction(keras_loss.Loss, "__call__", self._make_call())
        self._compiled = PatchedFunction(CompileLoss, "call", self._make_compiled())
        added = PatchedFunction(Trainer, "_aggregate_additional_loss", self._sum)
        self._patches = (self._losses, self._computes, self._calls, self._compiled, self._adds, added)

    def __enter__(self) -> None:
        self._added_so_far.clear()
        for patch in self._patches:
            patch.__enter__()

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.__exit__(*error)

    def _make_call(self) -> Callable[..., Any]:
        # A function, not a bound method: as an attribute of the class it is called with the loss.
        def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            own = self._calls.original
            if couples_samples(loss, y_pred):
                return over_global_batch(partial(own, loss), y_true, y_pred, sample_weight)
            result = own(loss, y_true, y_pred, sample_weight)
            return _scale_to_sum(result) if is_marked_as_sum(loss) and is_in_step() else result

        return call

    def _make_compiled(self) -> Callable[..., Any]:
        def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return self._compiled.original(loss, _targets_by_output(loss, y_true, y_pred), y_pred, sample_weight)

        return call

    def _make_add(self) -> Callable[..., Any]:
        def add(layer: Any, loss: Any) -> None:
            if is_in_step() and (kinds := getattr(layer, "_phalanx_added", None)):
                loss = [self._added_number(each, kinds, layer) for each in tree.flatten(loss)]
            self._adds.original(layer, loss)

        return add

    def _added_number(self, value: Any, kinds: Sequence[bool | None], layer: Any) -> Any:
        """Reduce an added loss of a layer to one number, if it is known how it combines."""
        number = self._added_so_far[id(layer)] % len(kinds)
        self._added_so_far[id(layer)] += 1
        kind = kinds[number]
        return value if kind is None else _scale_to_sum(ops.sum(value)) if kind else ops.sum(value)

    def _make_compute(self) -> Callable[..., Any]:
        def compute(model: Any, *arguments: Any, **named: Any) -> Any:
            loss = self._computes.original(model, *arguments, **named)
            return _scale_to_sum(loss) if is_marked_as_sum(model) and is_in_step() else loss

        return compute

    def _reduce(
        self,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        original = self._losses.original
        if _global_loss_depth.value or not is_in_step():
            return original(values, sample_weight, mask, reduction, dtype)
        if tuple(values.shape) == ():
            of_samples = sample_weight is not None and len(sample_weight.shape) > 0
            if not of_samples or mask is not None or reduction not in _MEAN_REDUCTIONS:
                return original(values, sample_weight, mask, reduction, dtype)
            weights = ops.cast(sample_weight, "float32")
            # The mean of all ranks' weights: Keras multiplies one number by every weight and takes the mean.
            total, number = _all_reduce_scalars([ops.sum(weights), ops.cast(ops.size(weights), "float32")])
            loss = original(values, None, None, reduction, dtype)
            return loss * ops.cast(total / ops.maximum(number, 1.0), loss.dtype)
        # Keras multiplies the weights by the mask in place.
        weight = sample_weight if sample_weight is None or mask is None else ops.copy(sample_weight)
        if reduction == "sum":
            return _scale_to_sum(original(values, weight, mask, reduction, dtype))
        if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
            (denominator,) = _all_reduce_scalars([_sum_of_weights(values, sample_weight, mask)])
            # This rank's numerator alone. Its own denominator could be zero or negative even if the sum of all ranks'
            # is neither.
            own = original(values, weight, mask, "sum", dtype)
            return _scale_to_sum(
                ops.divide_no_nan(own, ops.cast(denominator, own.dtype))
            )  # zero even for NaN, as in Keras
        loss = original(values, weight, mask, reduction, dtype)
        if reduction not in _MEAN_REDUCTIONS or mask is None:
            return loss
        left = ops.sum(ops.cast(mask, "float32"))
        return _scale_to_sum(loss, ops.divide_no_nan(left, _all_reduce_scalars([left])[0]))

    def _sum(self, added: Any) -> Any:
        total: Any = ops.sum(ops.cast(added, "float32") if "float" not in str(added.dtype) else added)
        return _scale_to_sum(total) if is_in_step() and has_samples(added, self.batch_size) else total


def _targets_by_output(loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Return the targets of a model with several outputs and one loss as Keras takes them from a whole batch.

    Keras first tries to split a single tensor into one sample per output. If a part of a batch has as many samples as
    there are outputs, this succeeds without an error.
    """
    if tree.is_nested(y_true) or not tree.is_nested(y_pred) or len(tree.flatten(y_pred)) < 2:
        return y_true
    losses = tree.flatten(loss._user_loss)
    if sum(each is not None for each in losses) != 1:
        return y_true
    return tree.pack_sequence_as(loss._user_loss, [None if each is None else y_true for each in losses])


def has_samples(values: Any, batch_size: int) -> bool:
    """Whether the first axis has one value per sample of a batch. Its length is None for a batch of unknown size."""
    return len(values.shape) > 0 and values.shape[0] in (None, batch_size)


def _all_reduce_scalars(own: list[Any]) -> list[Any]:
    """Sum scalars over the ranks, without a gradient."""
    collectives = step_collectives.current()
    assert collectives is not None, "losses are scaled inside of a step"
    return collectives.all_reduce([ops.stop_gradient(value) for value in own])


def _scale_to_sum(own: Any, factor: Any = 1.0) -> Any:
    """Scale a rank's part of a sum so that the mean weighted by the shares is the sum over the ranks."""
    share = ops.convert_to_tensor(share_of_step(), "float32")
    return own * ops.cast(factor * ops.divide_no_nan(1.0, share), own.dtype)  # zero without samples


def _sum_of_weights(values: Any, sample_weight: Any, mask: Any) -> Any:
    """Return Keras's divisor for `mean_with_sample_weight`, in float32: half precision cannot count beyond 2048."""
    values = ops.convert_to_tensor(values)
    weight = None if sample_weight is None else ops.copy(ops.convert_to_tensor(sample_weight))
    mask = None if mask is None else ops.convert_to_tensor(mask)
    weight = keras_loss.apply_mask(weight, mask, dtype=values.dtype, reduction="mean_with_sample_weight")
    _, weight = keras_loss.squeeze_or_expand_to_same_rank(values, weight)
    return ops.sum(ops.cast(weight, "float32"))
