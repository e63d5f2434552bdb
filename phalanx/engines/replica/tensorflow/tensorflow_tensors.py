"""TensorFlow's tensors in custom training loops: conversion to and from host arrays, host calls, and pickling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import numpy as np
import tensorflow as tf

from phalanx.engines.replica.tensorflow.graph_iteration import GraphDataset
from phalanx.engines.replica.tensorflow.host_calls import call_on_host, pop_failure
from phalanx.engines.replica.tensorflow.indexed_slices import are_batch_independent, merge_slices, slices_of
from phalanx.engines.tensors import Gradient, HostFunction, RowGather, Shape, Tensors, same_shape
from phalanx.errors import UnsupportedError
from phalanx.keras_compat.global_batch.tensorflow_replica_count import count_replicas
from phalanx.keras_compat.tensorflow_trace_keys import add_trace_key
from phalanx.keras_compat.variables.tensorflow_merged_variables import variable_merge_scope

Array = np.ndarray[Any, Any]


class TensorFlowTensors(Tensors):
    """See `phalanx.engines.tensors.Tensors`."""

    distributed_dataset = GraphDataset
    add_trace_key = staticmethod(add_trace_key)
    count_replicas = staticmethod(count_replicas)
    variable_merge_scope = staticmethod(variable_merge_scope)
    outside_of_traces = staticmethod(tf.init_scope)

    def from_host(self, array: Array) -> Any:
        return tf.convert_to_tensor(array)

    def call(
        self,
        function: HostFunction,
        tensors: Sequence[Any],
        *,
        shape_of: Callable[[Shape], Shape] = same_shape,
        gradient: Gradient | None = None,
    ) -> list[Any]:
        if any(isinstance(tensor, tf.RaggedTensor) for tensor in tensors):
            raise UnsupportedError(
                "Ragged tensors of several replicas cannot be merged: their rows differ in length. Merge what you "
                "compute of them, or tensor.to_tensor() where the replicas' shapes agree."
            )
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]  # sparse gradients, too
        if gradient is None:
            return _on_host(function, tensors, _shapes_of(shape_of, tensors))
        floating = [i for i, tensor in enumerate(tensors) if tensor.dtype.is_floating]
        kinds = [tensors[i].shape for i in floating]
        shapes = [
            each.as_list() if each.is_fully_defined() else tf.shape(tensors[i])
            for i, each in zip(floating, kinds, strict=True)
        ]

        def of_all(arrays: list[Array]) -> list[Array]:
            flowing, lengths = arrays[: len(floating)], arrays[len(floating) :]
            return gradient(flowing, [tuple(map(int, each)) for each in lengths])

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def there(*values: Any) -> Any:
            return _on_host(function, values, _shapes_of(shape_of, values)), lambda *grads: placed(back(*picked(grads)))

        # The function is linear, and so is its gradient, whose own gradient is the function.
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def back(*flowing: Any) -> Any:
            own = _on_host(of_all, [*flowing, *map(tf.convert_to_tensor, shapes)], kinds)
            return own, lambda *upstream: picked(there(*placed(upstream, tf.zeros_like)))

        def picked(every: Sequence[Any]) -> list[Any]:
            return [tf.convert_to_tensor(every[i]) for i in floating]

        def placed(own: Sequence[Any], other: Callable[[Any], Any] = lambda tensor: None) -> list[Any]:
            given = iter(own)
            return [next(given) if i in floating else other(tensor) for i, tensor in enumerate(tensors)]

        return list(there(*tensors))

    def merge_gradients(self, merge: HostFunction, gather: RowGather, gradients: Sequence[Any]) -> list[Any]:
        slices = slices_of(gradients)
        is_batch_independent = {i: are_batch_independent(each.indices) for i, each in slices.items()}
        merged = merge_slices(slices, is_batch_independent, gather) if slices else {}
        dense = [i for i in range(len(gradients)) if i not in slices]
        if dense:
            merged |= zip(dense, self.call(merge, [gradients[i] for i in dense]), strict=True)
        return [merged[i] for i in range(len(gradients))]

    @staticmethod
    def find_cause(error: BaseException) -> BaseException | None:
        if isinstance(error, tf.errors.InvalidArgumentError) and "PyFunc" in str(error) and "XLA" in str(error):
            return UnsupportedError(
                "A merge over the replicas (apply_gradients, strategy.reduce, ...) cannot be compiled by XLA "
                "(tf.function(jit_compile=True)): compile the part that computes gradients, and call the rest from a "
                "tf.function without."
            )
        failure = pop_failure() if isinstance(error, tf.errors.OpError | RuntimeError) else None
        if failure is None:
            return None
        first_line = str(failure).partition("\n")[0]
        named = type(failure).__name__ in str(error) if isinstance(error, tf.errors.OpError) else bool(first_line)
        return failure if named and first_line[:80] in str(error) else None

    def pickle_reduce(self, thing: Any) -> Any:
        if isinstance(thing, tf.types.experimental.PolymorphicFunction):
            # Its own pickle contains what was traced here, which cannot be sent. It is traced again there.
            options = {
                "input_signature": thing.input_signature,
                "autograph": thing._autograph,
                "jit_compile": thing._jit_compile,
                "reduce_retracing": thing._reduce_retracing,
            }
            return _function, (_unbound(thing.python_function), options)
        if isinstance(thing, tf.RaggedTensor):
            return _ragged, (thing.values, thing.row_splits)
        if isinstance(thing, tf.SparseTensor):
            return tf.SparseTensor, (thing.indices, thing.values, thing.dense_shape)
        if isinstance(thing, tf.data.Dataset):
            graph = tf.raw_ops.DatasetToGraphV2(input_dataset=thing._variant_tensor)
            return _dataset, (graph.numpy(), thing.element_spec)
        return NotImplemented


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a `tf.function`, without the weak references with which TensorFlow binds methods."""
    target: Any = getattr(getattr(function, "__original_wrapped__", None), "__self__", None)
    if type(target).__name__ != "TfMethodTarget":
        return function
    if target.target is None:
        raise UnsupportedError(f"The object that the method {function.__qualname__} belongs to no longer exists.")
    return MethodType(target.weakrefself_func__(), target.target)


def _function(python_function: Callable[..., Any], options: dict[str, Any]) -> Any:
    return tf.function(python_function, **options)


def _ragged(values: Any, row_splits: Any) -> Any:
    return tf.RaggedTensor.from_row_splits(values, row_splits)


def _dataset(graph: bytes, element_spec: Any) -> Any:
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def _shapes_of(shape_of: Callable[[Shape], Shape], tensors: Sequence[Any]) -> list[Shape | None]:
    return [None if tensor.shape.rank is None else shape_of(tensor.shape.as_list()) for tensor in tensors]


def _on_host(function: HostFunction, tensors: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Return as many results as `shapes`, in the dtypes of the first tensors."""
    results = call_on_host(function, tensors, [tensor.dtype for tensor in tensors[: len(shapes)]])
    if tf.inside_function():
        for shape, result in zip(shapes, results, strict=True):
            result.set_shape(shape)
    return results
