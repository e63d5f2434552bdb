"""Collectives for TensorFlow tensors, in eager code and in graphs. Names and semantics are Horovod's.

Each has a gradient. None works inside `tf.function(jit_compile=True)`, since XLA cannot call the host. In a graph, a
`HorovodInternalError` is raised as a `tf.errors.OpError` with the same text. For `tf.IndexedSlices`, an allreduce
gathers the slices of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from phalanx.engines.replica.tensorflow.host_calls import is_session_graph, linear
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.horovod import basics, operations
from phalanx.horovod.common.process_sets import ProcessSet, get_process_set_ids_and_ranks, global_process_set
from phalanx.horovod.compressors import run_compressed
from phalanx.horovod.framework_bindings import make_collective_function
from phalanx.horovod.operation_request import Array, OperationKind
from phalanx.horovod.operations import Arguments, Average, Sum, barrier, join
from phalanx.horovod.tensorflow.compression import Compression
from phalanx.horovod.tensorflow.host_functions import call_host, call_host_first_order, cast_to_specs, name_in_graph

WrapWait = Callable[[Callable[[], Any]], Any]


def _differentiable(kind: OperationKind, tensors: Sequence[Any], arguments: Arguments, wrap: WrapWait) -> list[Any]:
    """Return the results of a collective of dense tensors, with a gradient."""
    # Here and not on the host: an error in a running graph keeps only its text.
    arguments.process_set.check_registered()
    arguments = msgspec.structs.replace(arguments, name=arguments.name or name_in_graph(kind.value))
    # Splits may become known only when the graph runs, so they are an input of the host function.
    splits = [] if arguments.splits is None else [tf.convert_to_tensor(arguments.splits)]

    def forward(arrays: list[Array]) -> Any:
        called = arguments
        if splits:
            *arrays, counts = arrays
            called = msgspec.structs.replace(arguments, splits=counts)
        return wrap(operations.start(kind, arrays, called, wake=False).wait)

    if kind is OperationKind.ALLREDUCE:
        result_specs = [(each.dtype, each.shape) for each in tensors]

        def back(*upstream: Any) -> list[Any]:
            called, gradients = _for_gradient(arguments), cast_to_specs(upstream, result_specs)
            return call_host(lambda arrays: operations.gradient(kind, arrays, called), gradients, result_specs)

        return list(linear(lambda *inputs: call_host(forward, inputs, result_specs), back)(*tensors))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def collective(*inputs: Any) -> Any:
        counts = [(tf.int32, [None])] if kind is OperationKind.ALLTOALL else []
        results = call_host(
            forward, [*inputs, *splits], [(each.dtype, _result_shape(kind, each)) for each in inputs] + counts
        )

        def gradient(*upstream: Any) -> Any:
            called = _for_gradient(arguments)

            def backward(arrays: list[Array]) -> Any:
                *gradients, rows = arrays
                return operations.gradient(kind, gradients, called, [int(each) for each in rows])

            if counts:
                rows = results[1]
            elif kind is OperationKind.ALLGATHER:
                rows = tf.stack([tf.shape(each, tf.int64)[0] for each in inputs])
            else:
                rows = tf.zeros([0], tf.int64)
            return call_host_first_order(
                backward, upstream[: len(inputs)], [(each.dtype, each.shape) for each in inputs], rows
            )

        return results, gradient

    return list(collective(*tensors))


def _for_gradient(arguments: Arguments) -> Arguments:
    """Return the arguments of the operation that computes the gradient of a collective."""
    called = arguments.for_gradient()
    # A graph for a session may hold several gradients of one collective, which run concurrently.
    return msgspec.structs.replace(called, name=name_in_graph(str(called.name))) if is_session_graph() else called


def _result_shape(kind: OperationKind, tensor: Any) -> Any:
    """Return the static shape of a result."""
    if not operations.changes_row_count(kind):
        return tensor.shape
    return None if tensor.shape.rank is None else [None, *tensor.shape[1:]]


def run_collective(
    kind: OperationKind,
    tensors: Sequence[Any],
    arguments: Arguments,
    compression: Any = Compression.none,
    *,
    wrap_wait: WrapWait = lambda wait: wait(),
) -> list[Any]:
    """See `framework_bindings.Run`.

    Args:
        kind: The collective.
        tensors: Its inputs; an allreduce also takes `tf.IndexedSlices`.
        arguments: Arguments of the collective.
        compression: Compressor for reductions.
        wrap_wait: Function that calls, on the host, the wait for the result of dense tensors, and returns its result.
    """
    results: dict[int, Any] = {}
    dense: dict[int, Any] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices) and kind is OperationKind.ALLREDUCE:
            name = f"{arguments.name}.{index}" if arguments.name else None
            results[index] = _sparse_allreduce(tensor, msgspec.structs.replace(arguments, name=name))
        else:
            dense[index] = tf.convert_to_tensor(tensor)
    if operations.changes_row_count(kind) and any(each.shape.rank == 0 for each in dense.values()):
        raise ConfigurationError(f"{kind} works on rows, and the tensor is a single number (0 dimensions).")
    if kind is OperationKind.ALLTOALL:
        return _differentiable(kind, list(dense.values()), arguments, wrap_wait)
    if dense:
        reduced = run_compressed(
            compression, list(dense.values()), lambda packed: _differentiable(kind, packed, arguments, wrap_wait)
        )
        results.update(zip(dense, reduced, strict=True))
    return [results[index] for index in range(len(tensors))]


def _function(name: str, parameters: str) -> Callable[..., Any]:
    function: Callable[..., Any] = tf.autograph.experimental.do_not_convert(
        make_collective_function(__name__, name, parameters, run=run_collective)
    )
    return function


_REDUCTION = "average device_dense device_sparse compression op prescale_factor postscale_factor"

allreduce = _function("allreduce", f"tensor {_REDUCTION} name process_set ignore_name_scope")
grouped_allreduce = _function("grouped_allreduce", f"tensors {_REDUCTION} process_set ignore_name_scope name")
allgather = _function("allgather", "tensor name ignore_name_scope process_set")
grouped_allgather = _function("grouped_allgather", "tensors name ignore_name_scope process_set")
broadcast = _function("broadcast", "tensor root_rank name ignore_name_scope process_set")
alltoall = _function("alltoall", "tensor splits name ignore_name_scope process_set")
reducescatter = _function(
    "reducescatter",
    "tensor device_dense compression op name process_set ignore_name_scope prescale_factor postscale_factor",
)
grouped_reducescatter = _function(
    "grouped_reducescatter", "tensors device_dense compression op process_set prescale_factor postscale_factor name"
)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables with their values on rank `root_rank`; they travel together.

    Args:
        variables: `tf.Variable`s, matching on all ranks.
        root_rank: Rank in the job whose values are sent.
        name: Name of the operation; equal on all ranks.
        process_set: The ranks that take part.

    Returns: the variables; in a session's graph, the assignments, which run when they are fetched.
    """
    variables = list(variables)
    arguments = Arguments(name or name_in_graph("broadcast_variables"), process_set, root_rank=root_rank)
    values = run_collective(OperationKind.BROADCAST, variables, arguments)
    # In a `tf.function`, assignments always run; in a session, only if they are fetched.
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    return assigned if is_session_graph() else variables


def _sparse_allreduce(slices: Any, arguments: Arguments) -> Any:
    factors = arguments.prescale_factor, arguments.postscale_factor
    # `isclose`: a `gradient_predivide_factor` divides and multiplies, with two roundings.
    if arguments.op not in (Average, Sum) or not math.isclose(math.prod(factors), 1.0):
        raise UnsupportedError(
            f"tf.IndexedSlices can be merged by Average or Sum, and not scaled; they were to be merged by "
            f"{arguments.op}, with the factors {factors}. Pass sparse_as_dense=True, or make them dense with "
            f"tf.convert_to_tensor."
        )
    gather = Arguments(arguments.name, arguments.process_set)
    # One group, so that values and indices stay together.
    values, indices = run_collective(OperationKind.ALLGATHER, [slices.values, slices.indices], gather)
    gathered = tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)
    return divide_by_rank_count(gathered, arguments.process_set) if arguments.op is Average else gathered


def divide_by_rank_count(tensor: Any, process_set: ProcessSet) -> Any:
    """Divide a tensor, or `tf.IndexedSlices`, by the number of ranks at the time the graph runs."""
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(divide_by_rank_count(tensor.values, process_set), tensor.indices, tensor.dense_shape)
    return tensor / tf.cast(_host_number(process_set.size), tensor.dtype)


# ------------------------------------------------------------------------------------- numbers of the job, as tensors


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the size of a process set as a tensor, read when the graph runs, since an elastic job can change it.

    Raises: ConfigurationError if there is no process set with this number.
    """
    return _host_number(lambda: len(_ranks_of(process_set_id)))


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return whether this process is a member of a process set, as a tensor: 1 or 0. See `size_op`."""
    return _host_number(lambda: basics.rank() in _ranks_of(process_set_id))


def rank_op(name: str | None = None) -> Any:
    """Return `rank()` as a tensor. See `size_op`."""
    return _host_number(basics.rank)


def local_rank_op(name: str | None = None) -> Any:
    """Return `local_rank()` as a tensor. See `size_op`."""
    return _host_number(basics.local_rank)


def local_size_op(name: str | None = None) -> Any:
    """Return `local_size()` as a tensor. See `size_op`."""
    return _host_number(basics.local_size)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _host_number(read: Callable[[], int]) -> Any:
    return call_host(lambda _: [np.int32(read())], [0], [(tf.int32, [])])[0]


def _ranks_of(process_set_id: int) -> Sequence[int]:
    known = get_process_set_ids_and_ranks()
    if process_set_id not in known:
        raise ConfigurationError(f"no process set has the number {process_set_id}; there are {sorted(known)}.")
    return known[process_set_id]


__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
