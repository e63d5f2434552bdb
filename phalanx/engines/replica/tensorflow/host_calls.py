"""Host functions called in the middle of a graph, in program order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from phalanx.errors import UnsupportedError
from phalanx.keras_compat.observation.variable_assignments import INTERNAL_PREFIX

Array = np.ndarray[Any, Any]


def is_session_graph() -> bool:
    """Whether a session runs the current graph, or the one around it, as in TensorFlow 1."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def call_in_graph(
    function: Callable[..., Sequence[Array] | None], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> Any:
    """Call a function of the tensors' arrays, and return its results as tensors of these dtypes.

    TensorFlow keeps the order of operations that use the same variable, even in nested functions and branches. A bare
    host call uses no variable, so its order is kept only within its own graph. So every call here uses one variable:
    ranks that merge in different orders would merge different things.

    Raises: UnsupportedError in a graph of TensorFlow 1, which has no such order: calls that wait for other ranks would
        fill the few threads of its session, in another order on each rank, until nothing can proceed.
    """
    if is_session_graph():
        raise UnsupportedError(
            "Values cannot be merged in a tf.Graph that a session runs (TensorFlow 1). Merge them in eager code, or "
            "in a tf.function that eager code calls."
        )
    # Read and written before and after, so that TensorFlow's automatic control dependencies put calls in program order.
    order = _order_variable()
    with tf.control_dependencies([order.assign_add(1)]):
        results = tf.numpy_function(function, tensors, dtypes)
    with tf.control_dependencies(tf.nest.flatten(results)):
        order.assign_add(1)
    return results


_failures: list[BaseException] = []
"""The error of the last host call, if it failed. TensorFlow replaces it with its own error, and so may Keras when it
calls a layer."""


def call_on_host(
    function: Callable[[list[Array]], Sequence[Array]], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """Call a function of the tensors' arrays, in a graph or eagerly; see `call_in_graph`."""

    def call(*arrays: Array) -> Sequence[Array]:
        _failures.clear()
        try:
            return function(list(arrays))
        # BaseException, because the interruption of a trial (`local_ranks.CollectivePending`) is not an Exception.
        except BaseException as error:
            _failures.append(error)
            raise

    if tf.executing_eagerly():
        return [tf.convert_to_tensor(array) for array in call(*[tensor.numpy() for tensor in tensors])]
    return list(call_in_graph(call, tensors, dtypes))


def pop_failure() -> BaseException | None:
    """Return and clear the error of the last function that `call_on_host` called; None if there is none."""
    return _failures.pop() if _failures else None


def linear(function: Callable[..., Any], adjoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a linear function of tensors whose gradient is its adjoint. The gradient of that is the function again.

    A host call has no gradient, which TensorFlow would silently treat as zero.
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
def _order_variable() -> Any:
    """The variable that all calls use. Created in another thread, because later traces may not create variables."""
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(_make_order_variable).result()


def _make_order_variable() -> Any:
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{INTERNAL_PREFIX}_turn")
