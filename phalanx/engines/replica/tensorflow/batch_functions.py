"""Functions of batches, compiled by TensorFlow and called without its search for the right trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from phalanx.arrays.tree import map_leaves
from phalanx.engines.engine import Batch
from phalanx.engines.replica.tensorflow.direct_calls import DirectCall


class BatchFunction:
    """A function of one batch, traced for batches of any size; the function itself if the model runs eagerly.

    Args:
        function: Function of `(x, y, sample_weight)`, as tensors.
        eager: Whether the model runs eagerly.
        jit_compile: Whether XLA compiles it.
        for_each_shape: Whether each shape of samples has its own trace. Otherwise, the trace of a batch, and so perhaps
            the last bits of its results, depends on the shapes that came before.
    """

    def __init__(
        self, function: Callable[..., Any], *, eager: bool, jit_compile: bool = False, for_each_shape: bool = False
    ) -> None:
        # The kind of the last batch, and its trace. One is enough: only the last batch of a pass differs from the rest.
        self._last: tuple[Any, DirectCall] | None = None
        self.traced = function
        if eager:
            return

        self.traced = tf.function(
            tf.autograph.experimental.do_not_convert(function),
            jit_compile=jit_compile,
            reduce_retracing=not for_each_shape,
        )
        # The warning counts calls that trace again. It does not see the others, which `__call__` makes directly.
        self.traced._omit_frequent_tracing_warning = True  # type: ignore[attr-defined]

    def __call__(self, data: Batch) -> Any:
        """Call with a batch of arrays. TensorFlow takes 0.1 ms to find that a batch is like the last one."""
        function, tensors = self.traced, to_tensors(data)
        if tf.config.functions_run_eagerly() or not isinstance(function, tf.types.experimental.PolymorphicFunction):
            return function(tensors)
        kind = batch_kind(data)
        if self._last is None or self._last[0] != kind:
            # For batches of any size from the first one on, as in Keras: what a model computes from the number of
            # samples must not become a constant, and a second trace, for another size, might see changes that the
            # program has made since, unlike Keras's own trace.
            traced = function.get_concrete_function(map_leaves(spec_of_batch, data))
            self._last = kind, DirectCall(traced, tensors)
        return self._last[1](tensors)


def runs_eagerly(model: Any) -> bool:
    """Whether TensorFlow calls the functions of a model without tracing them."""
    return bool(model.run_eagerly or tf.config.functions_run_eagerly())


def spec_of_batch(array: Any, size: int | None = None) -> Any:
    """Return the `tf.TensorSpec` of an array whose first axis is the samples; any number of them if `size` is None."""
    return tf.TensorSpec([size, *array.shape[1:]] if array.shape else [], tf.as_dtype(array.dtype))


def to_tensors(data: Batch) -> Batch:
    """Convert a batch of arrays to tensors."""
    converted: Batch = map_leaves(tf.convert_to_tensor, data)
    return converted


def batch_kind(data: Any) -> Any:
    """Return the key of a batch's trace: structure, shapes and dtypes."""
    if isinstance(data, Mapping):
        return [(name, batch_kind(value)) for name, value in data.items()]
    if isinstance(data, list | tuple):
        return [type(data), *map(batch_kind, data)]
    return None if data is None else (data.shape, data.dtype)
