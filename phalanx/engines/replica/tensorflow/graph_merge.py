"""The merge of a step on TensorFlow: calls of the host in the middle of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from phalanx.engines.engine import GradientRows, Merge, MicroBatchKept
from phalanx.engines.merge_collectives import MergeCollectives
from phalanx.engines.replica.tensorflow.host_calls import call_on_host, take_failure
from phalanx.engines.replica.tensorflow.tensorflow_tensors import TensorFlowTensors
from phalanx.engines.step_layout import MergeWeight, StepLayout, gradient_weights
from phalanx.engines.tensors import HostFunction

Array = np.ndarray[Any, Any]


class HostCallNeeded(Exception):
    """A loss or a layer needs the other ranks in the middle of what XLA compiles, which cannot call the host."""


class GraphMerge:
    """Merges tensors over the ranks, inside a graph or eagerly.

    Attributes:
        collectives: those of losses and layers.
        share: this rank's share of the global batch, of the step that runs.
        share_in_graph: the same as a variable, for what is computed in a graph.
        xla: whether XLA compiles the part of the step before the merge.
        is_kept: in a step of micro-batches, whether others follow before the update; None in other steps.
        is_kept_in_graph: the same as a tensor.
    """

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self.collectives = MergeCollectives(merge, self._call)
        self.share = 1.0
        self.share_in_graph = tf.Variable(self.share)
        self.xla = False
        self._of_any_batch: dict[int, bool] = {}  # of each gradient by rows, see `_is_of_any_batch`
        self.is_kept: bool | None = None
        self.is_kept_in_graph: Any = None

    def begin_step(self, share: float) -> None:
        """Set this rank's share of the global batch of the step that follows."""
        if share != self.share:
            self.share = self.collectives.share = share
            self.share_in_graph.assign(share)
        take_failure()  # of an earlier step
        self.is_kept = None

    def _call(self, function: HostFunction, tensors: Sequence[Any], **options: Any) -> list[Any]:
        """See `Tensors.call`: a host call that a loss or layer makes."""
        if self.xla:
            raise HostCallNeeded
        return TensorFlowTensors().call(function, tensors, **options)

    def merge_gradients(self, gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        """The gradients of some weights, merged; see `merging_applies`."""
        if self._merge.updates:
            gradients = complete(gradients, weights)
        merged = self.dense(gradients, weights)
        sparse = self.gather_slices(merged)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None and i not in sparse]
        tensors = [merged[i] for i in present]
        values = self.merge(tensors, gradient_weights([weights[i] for i in present]))
        for i, value in [*zip(present, values, strict=True), *sparse.items()]:
            merged[i] = value
        return merged

    def dense(self, gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        """The gradients as tensors of the weights' shapes, which TensorFlow does not always know (recurrent layers);
        those of single rows as they are, where these are merged."""
        dense = list(gradients)
        for i, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if gradient is not None and not (self._merge.gather and isinstance(gradient, tf.IndexedSlices)):
                dense[i] = tf.convert_to_tensor(gradient)
                dense[i].set_shape(weight.shape)
        slices = [(i, gradient) for i, gradient in enumerate(dense) if isinstance(gradient, tf.IndexedSlices)]
        self._of_any_batch = {i: _is_of_any_batch(gradient.indices) for i, gradient in slices}
        return dense

    def gather_slices(self, gradients: Sequence[Any]) -> dict[int, Any]:
        """The gradients of single rows, which `dense` has left as they are, by number, merged. Keras's optimizers treat
        a row that occurs twice otherwise than one that occurs once with the sum: what plain Keras has apart must stay
        apart, and what it has summed over the whole batch must be summed over the ranks."""
        gather_rows = self._merge.gather
        slices = {i: g for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}
        if gather_rows is None or not slices:
            return {}
        tensors = [part for one in slices.values() for part in (one.indices, one.values)]
        of_any_batch = [self._of_any_batch[i] for i in slices]

        def gather(arrays: Sequence[Array]) -> list[Array]:
            own = [GradientRows(*each) for each in zip(arrays[::2], arrays[1::2], of_any_batch, strict=True)]
            merged = gather_rows(own, self.share)
            return [part for rows in merged for part in (rows.numbers, rows.gradients)]

        gathered = call_on_host(gather, tensors, [tensor.dtype for tensor in tensors])
        merged = {}
        for (i, own), indices, values in zip(slices.items(), gathered[::2], gathered[1::2], strict=True):
            indices.set_shape([None])
            values.set_shape([None, *own.values.shape[1:]])
            merged[i] = tf.IndexedSlices(values, indices, own.dense_shape)
        return merged

    def merge(
        self,
        tensors: Sequence[Any],
        weights: Sequence[MergeWeight],
        look: Callable[[StepLayout, Sequence[Array]], None] | None = None,
    ) -> list[Any]:
        """The tensors, merged over all ranks.

        Args:
            tensors: of known shapes.
            weights: how each counts in the sum.
            look: called with the layout and the merged flat buffers, on the host.
        """
        if not tensors:
            return []
        layout: StepLayout | None = None

        def merge(arrays: Sequence[Array]) -> list[Array]:
            nonlocal layout
            if layout is None:
                layout = StepLayout.of(arrays, weights)
            flats = self._merge(layout, arrays, self.share)
            if look is not None:
                look(layout, flats)
            return flats

        def merge_or_keep(arrays: Sequence[Array]) -> list[Any]:
            try:
                flats = merge(arrays)
                self.is_kept = False
            except MicroBatchKept:  # TensorFlow would report an error: the graph continues, and leaves out the update
                assert layout is not None
                flats = layout.allocate()
                self.is_kept = True
            return [*flats, np.array(self.is_kept)]

        dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
        if not self._merge.in_micro_batches:
            return _cut(tensors, call_on_host(merge, tensors, dtypes))
        *flats, self.is_kept_in_graph = call_on_host(merge_or_keep, tensors, [*dtypes, tf.bool])
        self.is_kept_in_graph.set_shape([])
        return _cut(tensors, flats)


def _is_of_any_batch(indices: Any) -> bool:
    """Whether a batch of any size and content has the same rows looked up (positions)."""
    if isinstance(indices, tf.__internal__.EagerTensor):
        numbers = indices.numpy()
        return len(np.unique(numbers)) == len(numbers)  # the samples of a batch would look up the same
    if indices.shape.is_fully_defined():
        return True  # in a graph the size of the batch is unknown
    seen: set[tuple[int, str]] = set()
    pending = [indices.op]
    while pending:
        op = pending.pop()
        key = (id(op.graph), op.name)
        if key in seen or (op.type == "StridedSlice" and _reads_length(op)):
            continue
        seen.add(key)
        captured = [outside for outside, inside in op.graph.captures if inside.op.name == op.name]
        if op.type in ("Placeholder", "PlaceholderWithDefault") and not captured:
            return False  # the batch
        if op.type in ("Shape", "Size"):
            return False  # of all axes, that of the samples among them
        pending += [outside.op for outside in captured if not isinstance(outside, tf.__internal__.EagerTensor)]
        pending += [tensor.op for tensor in op.inputs]
    return True


def _reads_length(op: Any) -> bool:
    """Whether a slice takes the length of an axis, not the first, from the shape of a tensor."""
    shape, begin = op.inputs[0].op, tf.get_static_value(op.inputs[1])
    if shape.type != "Shape" or begin is None or not op.get_attr("shrink_axis_mask"):
        return False
    rank = shape.inputs[0].shape.rank
    return rank is not None and int(begin[0]) % rank > 0


def complete(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """The gradients, zero where the loss does not depend on a weight."""
    return [
        tf.zeros(weight.shape, weight.dtype) if gradient is None else gradient
        for gradient, weight in zip(gradients, weights, strict=True)
    ]


def _cut(like: Sequence[Any], flats: Sequence[Any]) -> list[Any]:
    """The tensors inside the flat buffers, in the shapes and dtypes of `like`; as `Layout.cut` does."""
    by_dtype = dict(zip(dict.fromkeys(tensor.dtype for tensor in like), flats, strict=True))
    pieces: dict[Any, list[Any]] = {}
    for dtype, flat in by_dtype.items():
        sizes = [tensor.shape.num_elements() for tensor in like if tensor.dtype == dtype]
        flat.set_shape([sum(sizes)])
        pieces[dtype] = tf.split(flat, sizes)
    return [tf.reshape(pieces[tensor.dtype].pop(0), tensor.shape) for tensor in like]
