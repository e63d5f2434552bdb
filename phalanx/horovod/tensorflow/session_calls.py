"""Calls of the host from a graph that a session runs, as in TensorFlow 1.

A session runs any node that is ready, in any order, while a `tf.function` follows the order of the program. So the
collectives of one `session.run` may start in a different order on each rank. They are negotiated by name, which allows
any order if all of them can start. Therefore, a call of the host that waits for other ranks must not hold one of the
session's few threads: two ranks could fill theirs with different collectives, and deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def call_in_session(function: Callable[..., Any], tensors: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Do the same as `call_in_graph` in a session's graph: without an order, and on a separate thread.

    TensorFlow's nodes that call Python hold a thread of the session. The nodes of `tf.data` do not: they compute the
    element of a dataset on a new thread, and also run the dataset's functions there if these must not use the session's
    threads.

    Args:
        function: Function that takes arrays and returns an array for each dtype.
        tensors: Its arguments, at least one.
        dtypes: Dtypes of the results, at least one.
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
