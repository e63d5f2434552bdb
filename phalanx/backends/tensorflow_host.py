"""Calls of the host in the middle of a graph, which come in the order of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]


def call_in_graph(
    function: Callable[..., Sequence[Array] | None], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> Any:
    """The results of a function of the tensors' arrays, in tensors of these dtypes.

    TensorFlow keeps the order of operations that use one variable, however deep in functions and branches they are. A
    bare call of the host uses none, and its order is kept in its own graph only. Where ranks merge in two orders, they
    merge different things.
    """
    turn = _turn()
    with tf.control_dependencies([turn.assign_add(1)]):
        results = tf.numpy_function(function, tensors, dtypes)
    with tf.control_dependencies(tf.nest.flatten(results)):
        turn.assign_add(1)
    return results


def prepare() -> None:
    """Before a function that somebody else compiles: its later traces may make no variables."""
    _turn()


@functools.cache
def _turn() -> Any:
    """What all calls use."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="turn")
