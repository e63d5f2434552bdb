"""The merge of a step on TensorFlow: host calls in the middle of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from phalanx.engines.engine import GradientRows, Merge, UpdateDeferred
from phalanx.engines.merge_collectives import MergeCollectives
from phalanx.engines.replica.replica_engine import fill_missing_gradients
from phalanx.engines.replica.tensorflow.host_calls import call_on_host, pop_failure
from phalanx.engines.replica.tensorflow.indexed_slices import are_batch_independent, merge_slices, slices_of
from phalanx.engines.replica.tensorflow.tensorflow_tensors import TensorFlowTensors
from phalanx.engines.step_layout import MergeWeight, StepLayout, gradient_weights
from phalanx.engines.tensors import HostFunction
from phalanx.keras_compat.observation.variable_assignments import INTERNAL_PREFIX

Array = np.ndarray[Any, Any]


class HostCallInXlaError(Exception):
    """A loss or layer needs the other ranks in the middle of XLA-compiled code, which cannot call the host."""


class GraphMerge:
    """Merges tensors over the ranks, inside a graph or eagerly.

    Attributes:
        collectives: Collectives for losses and layers.
        share: This rank's share of the global batch of the current step.
        share_in_graph: The share as a variable, for computations in a graph.
        xla: Whether XLA compiles the part of the step before the merge.
        is_deferred: Whether other micro-batches follow before the update; None in steps without micro-batches.
        is_deferred_in_graph: `is_deferred` as a tensor.
    """

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self.collectives = MergeCollectives(merge, self._call)
        self.share = 1.0
        self.share_in_graph = tf.Variable(self.share, name=f"{INTERNAL_PREFIX}_share")
        self.xla = False
        self._is_batch_independent: dict[int, bool] = {}  # by index of each row gradient, see `are_batch_independent`
        self.is_deferred: bool | None = None
        self.is_deferred_in_graph: Any = None

    def begin_step(self, share: float) -> None:
        """Set this rank's share of the global batch of the next step."""
        if share != self.share:
            self.share = self.collectives.share = share
            self.share_in_graph.assign(share)
        pop_failure()  # of an earlier step
        self.is_deferred = None

    def _call(self, function: HostFunction, tensors: Sequence[Any], **options: Any) -> list[Any]:
        """Make a host call for a loss or layer; see `Tensors.call`."""
        if self.xla:
            raise HostCallInXlaError
        return TensorFlowTensors().call(function, tensors, **options)

    def merge_gradients(self, gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        """Return the merged gradients of some weights; see `merging_applies`."""
        if self._merge.updates_weights:
            gradients = fill_missing_gradients(gradients, weights)
        merged = self.dense(gradients, weights)
        sparse = self.gather_slices(merged)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None and i not in sparse]
        tensors = [merged[i] for i in present]
        own = [weights[i] for i in present]
        values = self.merge(tensors, gradient_weights(own), variables=own)
        for i, value in [*zip(present, values, strict=True), *sparse.items()]:
            merged[i] = value
        return merged

    def dense(self, gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        """Return the gradients as tensors of the weights' shapes, which TensorFlow does not always know (recurrent
        layers). Row gradients are left as they are if they are merged as rows."""
        dense = list(gradients)
        for i, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if gradient is not None and not (self._merge.gather and isinstance(gradient, tf.IndexedSlices)):
                dense[i] = tf.convert_to_tensor(gradient)
                dense[i].set_shape(weight.shape)
        self._is_batch_independent = {i: are_batch_independent(each.indices) for i, each in slices_of(dense).items()}
        return dense

    def gather_slices(self, gradients: Sequence[Any]) -> dict[int, Any]:
        """Return the merged row gradients, which `dense` has left as they are, by number. Keras's optimizers treat a
        row that occurs twice differently from one that occurs once with the sum: rows that are separate in plain Keras
        must stay separate, and rows that it sums over the whole batch must be summed over the ranks."""
        slices = {} if self._merge.gather is None else slices_of(gradients)
        if not slices:
            return {}
        is_batch_independent = {i: self._is_batch_independent[i] for i in slices}
        return merge_slices(slices, is_batch_independent, self._gather)

    def _gather(self, rows: Sequence[GradientRows]) -> list[GradientRows]:
        gather = self._merge.gather
        assert gather is not None, "it is traced only where rows are merged as rows"
        return gather(rows, self.share)

    def merge(
        self,
        tensors: Sequence[Any],
        weights: Sequence[MergeWeight],
        on_merged: Callable[[StepLayout, Sequence[Array]], None] | None = None,
        variables: Sequence[Any] = (),
    ) -> list[Any]:
        """Return the tensors, merged over all ranks.

        Args:
            tensors: Tensors of known shapes.
            weights: Weight of each tensor in the sum.
            on_merged: Called with the layout and the merged flat buffers, on the host.
            variables: See `StepLayout.of`.
        """
        if not tensors:
            return []
        layout: StepLayout | None = None

        def merge(arrays: Sequence[Array]) -> list[Array]:
            # The first run learns the shapes. All later runs of this trace have the same.
            nonlocal layout
            if layout is None:
                layout = StepLayout.of(arrays, weights, variables)
            flats = self._merge(layout, arrays, self.share)
            if on_merged is not None:
                on_merged(layout, flats)
            return flats

        def merge_or_defer(arrays: Sequence[Array]) -> list[Any]:
            try:
                flats = merge(arrays)
                self.is_deferred = False
            except UpdateDeferred:  # TensorFlow would report an error, so the graph continues and skips the update
                assert layout is not None
                flats = layout.allocate()
                self.is_deferred = True
            return [*flats, np.array(self.is_deferred)]

        dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
        if not self._merge.uses_micro_batches:
            return _cut(tensors, call_on_host(merge, tensors, dtypes))
        *flats, self.is_deferred_in_graph = call_on_host(merge_or_defer, tensors, [*dtypes, tf.bool])
        self.is_deferred_in_graph.set_shape([])
        return _cut(tensors, flats)


def _cut(like: Sequence[Any], flats: Sequence[Any]) -> list[Any]:
    """Return the tensors inside the flat buffers, in the shapes and dtypes of `like`, as `StepLayout.unpack` does."""
    by_dtype = dict(zip(dict.fromkeys(tensor.dtype for tensor in like), flats, strict=True))
    # Static shapes come from `like`: results of host calls have none.
    pieces: dict[Any, list[Any]] = {}
    for dtype, flat in by_dtype.items():
        sizes = [tensor.shape.num_elements() for tensor in like if tensor.dtype == dtype]
        flat.set_shape([sum(sizes)])
        pieces[dtype] = tf.split(flat, sizes)
    return [tf.reshape(pieces[tensor.dtype].pop(0), tensor.shape) for tensor in like]
