"""Collectives in the middle of a step, on every backend, for losses and layers that need values of the other ranks
(`phalanx.keras_compat.global_batch.step_collectives`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.arrays.tree import map_non_none
from phalanx.engines.engine import Merge
from phalanx.engines.step_layout import StepLayout, gradient_weights
from phalanx.engines.tensors import Array, Shape

Call = Callable[..., list[Any]]
"""See `phalanx.engines.tensors.Tensors.call`."""


class MergeCollectives:
    """Collectives of a step whose gradients a merge weights by the ranks' shares of the global batch.

    They weight the gradients that flow back in the same way, and divide the sum by this rank's share:

        own = (sum over r of share_r * gradient_r) / share

    Args:
        merge: Communicates with the other ranks.
        call: Calls host functions from where the backend's tensors live.

    Attributes:
        share: This rank's share of the global batch of the current step.
        samples: Numbers of samples in the global batch and in this rank's (the placeholder's if the share is 0), for a
            backend that must know shapes in advance; None elsewhere.
        has_gathered: Whether a step has called `all_gather`.
    """

    may_lack_samples = False

    def __init__(self, merge: Merge, call: Call) -> None:
        self._merge = merge
        self._call = call
        self.share = 1.0
        self.samples: tuple[int, int] | None = None
        self.has_gathered = False
        self.weights_gradients = True
        self.synchronizes_batch_norm = merge.synchronizes_batch_norm

    def all_reduce(self, tensors: list[Any]) -> list[Any]:
        """See `StepCollectives.all_reduce`."""
        return self._call(self._all_reduce_arrays, tensors, gradient=lambda flowing, shapes: self._backward(flowing))

    def all_gather(self, tensors: list[Any]) -> list[Any]:
        """See `StepCollectives.all_gather`."""
        self.has_gathered = True
        return self._call(self._gather, tensors, shape_of=self._gathered_shape, gradient=self._gather_backward)

    def merge_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return gradients merged as at the end of a step. None stays None."""
        own = [variable for variable, gradient in zip(variables, gradients, strict=True) if gradient is not None]

        def merge(arrays: Sequence[Array]) -> list[Array]:
            layout = StepLayout.of(arrays, gradient_weights(own), own)
            return [np.array(array) for array in layout.unpack(self._merge(layout, arrays, self.share))]

        return map_non_none(lambda present: self._call(merge, present) if present else [], gradients)

    def global_samples(self, own: int) -> int:
        """Return the number of samples in the global batch. All ranks must call this."""
        return len(self._merge.all_gather(np.zeros(own, np.uint8), self.share)[0])

    def _all_reduce_arrays(self, arrays: Sequence[Array]) -> list[Array]:
        totals: list[Array] = [np.zeros(0)] * len(arrays)
        # One message per dtype: a collective in a step costs more than the bytes of a few scalars.
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            chosen = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            flat = np.concatenate([arrays[i].reshape(-1) for i in chosen])
            parts = np.split(self._merge.all_reduce(flat, self.share), np.cumsum([arrays[i].size for i in chosen])[:-1])
            for i, part in zip(chosen, parts, strict=True):
                totals[i] = part.reshape(arrays[i].shape)
        return totals

    def _backward(self, gradients: Sequence[Array]) -> list[Array]:
        # `GlobalGradients` multiplied the loss by the share before the backward pass: the gradients already contain it.
        if not self.weights_gradients:
            return self._all_reduce_arrays(gradients)
        totals = self._all_reduce_arrays([gradient * gradient.dtype.type(self.share) for gradient in gradients])
        # This rank has no samples: no gradient may reach its placeholder.
        if not self.share:
            return [np.zeros_like(total) for total in totals]
        return [total / total.dtype.type(self.share) for total in totals]

    def _gather(self, arrays: Sequence[Array]) -> list[Array]:
        return [self._merge.all_gather(array, self.share)[0] for array in arrays]

    def _gather_backward(self, flowing: list[Array], shapes: list[tuple[int, ...]]) -> list[Array]:
        """Compute the gradient of `_gather`."""
        found = []
        for total, shape in zip(self._backward(flowing), shapes, strict=True):
            # The forward call also found where the rows begin, but perhaps in another trace. So this gathers again, one
            # byte per row.
            start = self._merge.all_gather(np.zeros(shape[0], np.uint8), self.share)[1]
            found.append(total[start : start + shape[0]] if self.share else np.zeros(shape, total.dtype))
        return found

    def _gathered_shape(self, shape: Shape) -> Shape:
        if self.samples is None or shape[0] is None:
            return [None, *shape[1:]]
        everyone, own = self.samples
        # An array may have several rows per sample, equally many on all ranks.
        return [shape[0] * everyone // own, *shape[1:]]
