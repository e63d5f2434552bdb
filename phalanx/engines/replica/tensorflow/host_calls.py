"""Calls of the host in the middle of a graph, which come in the order of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def linear(function: Callable[..., Any], adjoint: Callable[..., Any]) -> Callable[..., Any]:
    """A linear function of tensors whose gradient is its adjoint, and the gradient of that again the function.

    What calls the host has no gradient of its own, and TensorFlow takes that for nothing.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def there(*tensors: Any) -> Any:
        return function(*tensors), lambda *upstream: back(*upstream)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def back(*upstream: Any) -> Any:
        return adjoint(*upstream), lambda *tensors: there(*tensors)

    differentiable: Callable[..., Any] = there
    return differentiable


@functools.cache
def _turn() -> Any:
    """What all calls use. It is made in a thread of its own: later traces of a function may make no variables."""
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(_make_turn).result()


def _make_turn() -> Any:
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="turn")
