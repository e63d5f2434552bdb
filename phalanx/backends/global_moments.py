"""Batch normalization with the batches of all ranks: `BatchNormalization(synchronized=True)`, which Keras has on
TensorFlow.

Keras asks `tf.distribute` for the other replicas' sums, and is given its own where no strategy of TensorFlow's is
active. While a rank takes a step, or is in `strategy.run`, the layer asks here. Mean and variance come from sums over
the ranks, one after the other, so no digits are lost; gradients go back through those sums (Ioffe and Szegedy 2015,
section 3).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from keras import ops

Sum = Callable[[list[Any]], list[Any]]
"""Tensors summed over the ranks, all as one, with a gradient; all ranks call."""


class _Stack(threading.local):
    """The contexts that this thread is inside of, innermost last."""

    def __init__(self) -> None:
        self.sums: list[Sum] = []


_stack = _Stack()


class SummedBy(AbstractContextManager[None]):
    """A context in which synchronized layers normalize with what `sum_over_ranks` gives."""

    def __init__(self, sum_over_ranks: Sum) -> None:
        self._sum = sum_over_ranks

    def __enter__(self) -> None:
        _stack.sums.append(self._sum)

    def __exit__(self, *error: object) -> None:
        _stack.sums.pop()


def synchronizing(original: Callable[..., Any]) -> Callable[..., Any]:
    """`BatchNormalization._moments` that heeds such a context, from Keras's own."""

    @functools.wraps(original)
    def method(self: Any, inputs: Any, mask: Any) -> Any:
        if not self.synchronized or not _stack.sums:
            return original(self, inputs, mask)
        return moments(self, inputs, mask, _stack.sums[-1])

    return method


def moments(layer: Any, inputs: Any, mask: Any, sum_over_ranks: Sum) -> tuple[Any, Any]:
    """Mean and variance of each feature over all ranks' batches, shape (features,) each.

    Args:
        layer: a built BatchNormalization.
        inputs: float32 or wider, of shape (samples, ...).
        mask: of shape `inputs.shape[:-1]`, what counts; None: everything.
    """
    axes = layer._reduction_axes
    if mask is None:
        counted = ops.ones_like(inputs)
    else:
        mask = ops.expand_dims(ops.cast(mask, inputs.dtype), axis=-1)
        counted = ops.broadcast_to(mask, ops.shape(inputs))
    shape = [1] * len(inputs.shape)
    shape[layer.axis] = -1
    count, total = sum_over_ranks([ops.sum(counted, axes), ops.sum(inputs * counted, axes)])
    count = ops.maximum(count, 1.0)
    mean = total / count
    deviations = (inputs - ops.reshape(mean, shape)) * counted
    (squares,) = sum_over_ranks([ops.sum(ops.square(deviations), axes)])
    return mean, squares / count
