"""Row gradients (`tf.IndexedSlices`) of a variable, merged over the ranks as rows.

Keras's optimizers treat a row that occurs twice differently from one that occurs once with the sum. So rows that are
separate in plain Keras must stay separate, and rows that it sums over the whole batch must be summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from phalanx.engines.engine import GradientRows
from phalanx.engines.replica.tensorflow.host_calls import call_on_host

Array = np.ndarray[Any, Any]


def slices_of(gradients: Sequence[Any]) -> dict[int, Any]:
    """Return the row gradients among the gradients, by number."""
    return {i: gradient for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)}


def merge_slices(
    slices: Mapping[int, Any],
    is_batch_independent: Mapping[int, bool],
    gather: Callable[[Sequence[GradientRows]], list[GradientRows]],
) -> dict[int, Any]:
    """Merge row gradients, in a graph or eagerly.

    Args:
        slices: This rank's row gradients, by number.
        is_batch_independent: Whether every batch, of any size and content, looks up the same rows, for each gradient.
        gather: Returns the rows of all ranks; see `Merge.gather`.
    """
    tensors = [part for one in slices.values() for part in (one.indices, one.values)]

    def gather_arrays(arrays: Sequence[Array]) -> list[Array]:
        pairs = zip(slices, arrays[::2], arrays[1::2], strict=True)
        merged = gather([GradientRows(numbers, rows, is_batch_independent[i]) for i, numbers, rows in pairs])
        return [part for rows in merged for part in (rows.indices, rows.gradients)]

    gathered = call_on_host(gather_arrays, tensors, [tensor.dtype for tensor in tensors])
    merged = {}
    for (i, own), indices, values in zip(slices.items(), gathered[::2], gathered[1::2], strict=True):
        if tf.inside_function():
            indices.set_shape([None])
            values.set_shape([None, *own.values.shape[1:]])
        merged[i] = tf.IndexedSlices(values, indices, own.dense_shape)
    return merged


def are_batch_independent(indices: Any) -> bool:
    """Whether every batch, of any size and content, looks up the same rows (positions)."""
    if isinstance(indices, tf.__internal__.EagerTensor):
        numbers = indices.numpy()
        return len(np.unique(numbers)) == len(numbers)  # the samples of a batch would look up the same rows
    if indices.shape.is_fully_defined():
        return True  # in a graph, the size of the batch is unknown
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
            return False  # covers all axes, including the samples
        pending += [outside.op for outside in captured if not isinstance(outside, tf.__internal__.EagerTensor)]
        pending += [tensor.op for tensor in op.inputs]
    return True


def _reads_length(op: Any) -> bool:
    """Whether a slice takes the length of an axis other than the first from the shape of a tensor."""
    shape, begin = op.inputs[0].op, tf.get_static_value(op.inputs[1])
    if shape.type != "Shape" or begin is None or not op.get_attr("shrink_axis_mask"):
        return False
    rank = shape.inputs[0].shape.rank
    return rank is not None and int(begin[0]) % rank > 0
