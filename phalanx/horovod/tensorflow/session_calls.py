"""Calls of the host from a graph that a session runs, as in TensorFlow 1.

A session runs whatever is ready, in any order, while in a `tf.function` the order is that of the program. So
collectives of one `session.run` may begin in another order on each rank. They are negotiated by name, which makes any
order right if all of them can begin. A call of the host that waits for other ranks must therefore not hold one of the
session's few threads: two ranks could fill theirs with different collectives, and wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def call_in_session(function: Callable[..., Any], tensors: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """As `call_in_graph`, in a graph that a session runs: without an order, and on a thread of its own.

    TensorFlow's own nodes that call Python hold a thread of the session. The nodes of `tf.data` do not: the element of
    a dataset is computed on a thread that the node creates, with the functions of the dataset if they are not to use
    the session's.

    Args:
        function: takes arrays and returns one for each dtype.
        tensors: its arguments, at least one.
        dtypes: of the results, at least one.
    """
    types = {"output_types": list(dtypes), "output_shapes": [tf.TensorShape(None)] * len(dtypes)}
    mapped = tf.function(lambda *inputs: tf.numpy_function(function, inputs, list(dtypes))).get_concrete_function(
        *[tf.TensorSpec(each.shape, each.dtype) for each in tensors]
    )
    with tf.device("CPU:0"):
        inputs = tf.raw_ops.TensorDataset(components=tensors, output_shapes=[each.shape for each in tensors])
        outputs = tf.raw_ops.MapDataset(
            input_dataset=inputs, other_arguments=[], f=mapped, use_inter_op_parallelism=False, **types
        )
        return list(tf.raw_ops.DatasetToSingleElement(dataset=outputs, **types))
