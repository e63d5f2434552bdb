"""Calls of the host from TensorFlow: directly in eager code, else as a node of the graph."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from phalanx.engines.replica.tensorflow.host_calls import call_in_graph, is_session_graph
from phalanx.errors import CollectiveMismatchError, ConfigurationError
from phalanx.horovod.common.exceptions import HorovodInternalError
from phalanx.horovod.operations import raise_on_second_gradient
from phalanx.horovod.tensorflow.session_calls import call_in_session
from phalanx.keras_compat.tensorflow_session_errors import translate_session_errors

Array = np.ndarray[Any, Any]
HostFunction = Callable[[list[Array]], Sequence[Any]]
Converted = TypeVar("Converted", bound=Callable[..., Any])


class MismatchError(HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """The ranks' arguments of a collective differ. Also the error class that Horovod's callers in TensorFlow catch."""

    exit_code = CollectiveMismatchError.exit_code

    def __init__(self, message: str, node_def: Any = None, op: Any = None):
        tf.errors.FailedPreconditionError.__init__(self, node_def, op, message)


class ArgumentError(ConfigurationError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """Invalid arguments. Also the error class that Horovod's callers in TensorFlow catch."""

    def __init__(self, error: ConfigurationError):
        tf.errors.InvalidArgumentError.__init__(self, None, None, str(error))
        self.exit_code = error.exit_code


_counters: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Counters of the unnamed operations of each graph."""


def _not_converted(function: Converted) -> Converted:
    """Exclude a function from AutoGraph, which would warn about code that it cannot convert and change nothing."""
    return cast(Converted, tf.autograph.experimental.do_not_convert(function))


@_not_converted
def call_host(function: HostFunction, tensors: Sequence[Any], result_specs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Call a function with the tensors' values, and return its results as tensors.

    In a `tf.function`, calls run sequentially in the order of the program, which is the same on every rank. In a
    session's graph they have no order.

    Args:
        function: Function that takes a list of arrays and returns an array for each result.
        tensors: Its arguments, at least one.
        result_specs: Dtype and static shape of each result, at least one.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if tf.executing_eagerly():
        # Not as a node, so that errors keep their classes and nothing is traced.
        results = _call(function, [tensor.numpy() for tensor in tensors])
        return [tf.convert_to_tensor(array, dtype) for array, (dtype, _) in zip(results, result_specs, strict=True)]
    if is_session_graph():
        translate_session_errors(_mismatch_in_session)
        call: Callable[..., Sequence[Any]] = call_in_session
    else:
        call = call_in_graph
    results = call(lambda *arrays: _call(function, list(arrays)), tensors, [dtype for dtype, _ in result_specs])
    for result, (_, shape) in zip(results, result_specs, strict=True):
        result.set_shape(shape)
    return list(results)


def _call(function: HostFunction, arrays: list[Array]) -> Sequence[Any]:
    """Call a function, and convert its errors to those that Horovod's callers in TensorFlow catch."""
    try:
        return function(list(map(np.asarray, arrays)))  # TensorFlow's scalars are not arrays, and text is `bytes`
    except HorovodInternalError as error:
        if isinstance(error.__cause__, CollectiveMismatchError):
            raise MismatchError(str(error)) from error.__cause__
        raise
    except ConfigurationError as error:
        raise ArgumentError(error) from None


def _mismatch_in_session(error: tf.errors.UnknownError) -> MismatchError | None:
    """Restore a MismatchError from the text that TensorFlow keeps. In a `tf.function`, it stays an UnknownError."""
    is_mismatch = re.search(rf"\b{MismatchError.__name__}: ", error.message)
    return MismatchError(error.message, error.node_def, error.op) if is_mismatch else None


def call_host_first_order(
    function: HostFunction, upstream_gradients: Sequence[Any], result_specs: Sequence[tuple[Any, Any]], *others: Any
) -> list[Any]:
    """Call `call_host` for gradients, with an error when the result is differentiated again.

    Args:
        function: Function of the arrays of `upstream_gradients` and `others`.
        upstream_gradients: Gradients of the results of a collective.
        result_specs: Dtype and static shape of each result.
        others: More arguments of the function, without gradients.

    Raises: UnsupportedError when the result is differentiated; in a graph, a TensorFlow error with its text.
    """
    upstream_gradients = cast_to_specs(upstream_gradients, result_specs)

    def refuse(*upstream: Any) -> list[Any]:
        if tf.executing_eagerly():
            raise_on_second_gradient()
        # Under a second tape, TensorFlow always traces this. It runs only if the second gradient is used.
        results: list[Any] = tf.numpy_function(
            raise_on_second_gradient, list(upstream), [tensor.dtype for tensor in upstream_gradients], stateful=False
        )
        for result, tensor in zip(results, upstream_gradients, strict=True):
            result.set_shape(tensor.shape)
        return results

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def returned(*upstream: Any) -> Any:
        return call_host(function, [*upstream, *others], result_specs), refuse

    return list(returned(*upstream_gradients))


def cast_to_specs(gradients: Sequence[Any], result_specs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Cast the gradients of results. TensorFlow allows a program to pass initial gradients with another dtype.

    Args:
        gradients: Tensors.
        result_specs: Dtype and static shape of each result.
    """
    return [
        tf.cast(tf.convert_to_tensor(each), dtype) for each, (dtype, _) in zip(gradients, result_specs, strict=True)
    ]


def name_in_graph(kind: str) -> str | None:
    """Return a name for an unnamed operation.

    In a graph, the name is its position there, which is equal on all ranks no matter how often each traces the
    function. In eager code it is None, since operations run in the order of the program.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    # Bodies of loops and branches are inside the graph of the function, whose outer graph belongs to no function. A
    # session runs the outer graph, in which the names of functions have numbers that may differ between ranks.
    while hasattr(graph if is_session_graph() else getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    number = next(_counters.setdefault(graph, itertools.count()))
    return f"{kind}.{getattr(graph, 'name', 'graph')}.{number}"
