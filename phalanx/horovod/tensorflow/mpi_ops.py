"""Collectives of TensorFlow's tensors, in eager code and inside `tf.function`. Names and meaning are Horovod's.

Each has a gradient. Inside `tf.function(jit_compile=True)` none of them works, since XLA cannot call the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from phalanx.engines.replica.tensorflow.host_calls import linear
from phalanx.errors import ConfigurationError
from phalanx.horovod import basics, gradients, operations
from phalanx.horovod.operation_request import HorovodOp
from phalanx.horovod.operations import Average, Sum, check_op
from phalanx.horovod.process_sets import ProcessSet, get_process_set_ids_and_ranks, global_process_set
from phalanx.horovod.tensorflow.compression import Compression
from phalanx.horovod.tensorflow.host_functions import call, name_in_graph, once

Tensor = Any
"""A `tf.Tensor`, or what can be made one."""


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The tensor merged over the ranks. Of `tf.IndexedSlices`, all ranks' slices are gathered.

    Args:
        average: Horovod's old form of `op`.
        device_dense: means nothing here, as `device_sparse`: values are merged on the host.
        compression: see `Compression`.
        op: Average if not given.
        prescale_factor: multiplies before; `postscale_factor` after.
        name: in eager code None means: the n-th without a name belongs to every other rank's n-th.

    Raises: ConfigurationError, HorovodInternalError as `operations.allreduce`; inside `tf.function` the latter arrives
        as `tf.errors.OpError` with its words.
    """
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name=name,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: HorovodOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """As `allreduce` of each; the dense ones travel as one."""
    op = check_op(op, average)
    return reduce_together(tensors, compression, op, prescale_factor, postscale_factor, process_set, name)


def reduce_together(
    tensors: Sequence[Tensor],
    compression: Any,
    op: HorovodOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
    around: Callable[[Callable[[], Any]], Any] = lambda merge: merge(),
) -> list[Any]:
    """See `grouped_allreduce`.

    Args:
        around: calls, on the host, what merges the dense ones, and returns what that returns.
    """
    results: list[Any] = [None] * len(tensors)
    dense = [index for index, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[index] = _sparse(tensor, op, None if name is None else f"{name}.{index}", process_set)
    if dense:
        packed = [compression.compress(tf.convert_to_tensor(tensors[index])) for index in dense]
        merged = _allreduce([t for t, _ in packed], op, prescale, postscale, name, process_set, around)
        for index, tensor, (_, ctx) in zip(dense, merged, packed, strict=True):
            results[index] = compression.decompress(tensor, ctx)
    return results


def allgather(
    tensor: Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The ranks' tensors joined along the first dimension, which may differ."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As `allgather` of each; they begin together."""
    name = name or name_in_graph("allgather")

    def forward(arrays: list[Any]) -> Any:
        return operations.allgather(arrays, name=name, process_set=process_set, wake=False).wait()

    def backward(arrays: list[Any]) -> Any:
        *grads, rows = arrays
        return gradients.of_allgather(grads, [int(each) for each in rows], process_set, _gradient(name))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*inputs: Any) -> Any:
        def grad(*upstream: Any) -> Any:
            rows = tf.stack([tf.shape(each, tf.int64)[0] for each in inputs])
            return once(backward, upstream, [(each.dtype, each.shape) for each in inputs], rows)

        like = [(each.dtype, _any_rows(each)) for each in inputs]
        return call(forward, inputs, like), grad

    return list(differentiable(*map(_rows, tensors)))


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor of rank `root_rank`, on every rank."""
    name = name or name_in_graph("broadcast")

    def forward(arrays: list[Any]) -> Any:
        return operations.broadcast(arrays, root_rank, name=name, process_set=process_set, wake=False).wait()

    def backward(arrays: list[Any]) -> Any:
        return gradients.of_broadcast(arrays, root_rank, process_set, _gradient(name))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(given: Any) -> Any:
        like = [(given.dtype, given.shape)]
        return call(forward, [given], like)[0], lambda upstream: once(backward, [upstream], like)[0]

    return differentiable(tf.convert_to_tensor(tensor))


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Put the values of rank `root_rank`'s variables into everybody's; they travel as one."""
    name = name or name_in_graph("broadcast_variables")
    variables = list(variables)
    values = [tf.convert_to_tensor(variable) for variable in variables]

    def forward(arrays: list[Any]) -> Any:
        return operations.broadcast(arrays, root_rank, name=name, process_set=process_set, wake=False).wait()

    received = call(forward, values, [(value.dtype, value.shape) for value in values])
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)
    return variables


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows that all ranks sent here, joined; with `splits`, also how many came from each (int32).

    Args:
        splits: how many rows go to each rank, zeros included; None: equal parts.
    """
    name = name or name_in_graph("alltoall")
    given = [] if splits is None else [tf.convert_to_tensor(splits)]

    def forward(arrays: list[Any]) -> Any:
        counts = arrays[1] if given else None
        received, from_each = operations.alltoall(
            arrays[0], counts, name=name, process_set=process_set, wake=False
        ).wait()
        return received, np.asarray(from_each, np.int32)

    def backward(arrays: list[Any]) -> Any:
        return [gradients.of_alltoall(arrays[0], arrays[1], process_set, _gradient(name))]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(value: Any) -> Any:
        like = [(value.dtype, _any_rows(value)), (tf.int32, [None])]
        received, counts = call(forward, [value, *given], like)

        def grad(upstream: Any, _: Any) -> Any:
            return once(backward, [upstream], [(value.dtype, value.shape)], counts)[0]

        return (received, counts), grad

    received, counts = differentiable(_rows(tensor))
    return received if splits is None else (received, counts)


def reducescatter(
    tensor: Tensor,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: HorovodOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the tensor merged over the ranks; if they cannot be divided, the first ranks get one more."""
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, name, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: HorovodOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """As `reducescatter` of each; they begin together."""
    name = name or name_in_graph("reducescatter")
    op = check_op(op)
    factors = prescale_factor, postscale_factor

    def forward(arrays: list[Any]) -> Any:
        return operations.reducescatter(
            arrays,
            name=name,
            op=op,
            prescale_factor=factors[0],
            postscale_factor=factors[1],
            process_set=process_set,
            wake=False,
        ).wait()

    def backward(arrays: list[Any]) -> Any:
        return gradients.of_reducescatter(arrays, op, *factors, process_set, _gradient(name))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*inputs: Any) -> Any:
        def grad(*upstream: Any) -> Any:
            return once(backward, upstream, [(each.dtype, each.shape) for each in inputs])

        return call(forward, inputs, [(each.dtype, _any_rows(each)) for each in inputs]), grad

    packed = [compression.compress(_rows(tensor)) for tensor in tensors]
    merged = differentiable(*[tensor for tensor, _ in packed])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(merged, packed, strict=True)]


def join() -> int:
    """See `operations.join`; not inside `tf.function`."""
    return operations.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all members have called it; not inside `tf.function`."""
    operations.barrier(process_set)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The size of a process set as a tensor; asked for when the graph runs, as it may change in an elastic job.

    Raises: ConfigurationError if there is no process set of this number.
    """
    return _number(lambda: len(_ranks_of(process_set_id)))


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Whether this process is a member of a process set, as a tensor: 1 or 0. As `size_op`."""
    return _number(lambda: basics.rank() in _ranks_of(process_set_id))


def rank_op(name: str | None = None) -> Any:
    """`rank()` as a tensor. As `size_op`."""
    return _number(basics.rank)


def local_rank_op(name: str | None = None) -> Any:
    """`local_rank()` as a tensor. As `size_op`."""
    return _number(basics.local_rank)


def local_size_op(name: str | None = None) -> Any:
    """`local_size()` as a tensor. As `size_op`."""
    return _number(basics.local_size)


def _number(ask: Callable[[], int]) -> Any:
    return call(lambda arrays: [np.int32(ask())], [], [(tf.int32, [])])[0]


def _ranks_of(process_set_id: int) -> Sequence[int]:
    known = get_process_set_ids_and_ranks()
    if process_set_id not in known:
        raise ConfigurationError(f"no process set has the number {process_set_id}; there are {sorted(known)}.")
    return known[process_set_id]


# ------------------------------------------------------------------------------------------------------------ inside


def _allreduce(
    tensors: Sequence[Any],
    op: HorovodOp,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet,
    around: Callable[[Callable[[], Any]], Any],
) -> list[Any]:
    name = name or name_in_graph("allreduce")

    def forward(arrays: list[Any]) -> Any:
        pending = operations.allreduce(
            arrays,
            name=name,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
            wake=False,
        )
        return around(pending.wait)

    def backward(arrays: list[Any]) -> Any:
        return gradients.of_allreduce(arrays, op, prescale, postscale, process_set, _gradient(name))

    like = [(each.dtype, each.shape) for each in tensors]

    merge = linear(lambda *inputs: call(forward, inputs, like), lambda *upstream: call(backward, upstream, like))
    return list(merge(*tensors))


def _sparse(slices: Any, op: HorovodOp, name: str | None, process_set: ProcessSet) -> Any:
    if op not in (Average, Sum):
        raise ConfigurationError(
            f"tf.IndexedSlices can be merged by Average or Sum, not by {op.value}. Pass sparse_as_dense=True, or make "
            f"them dense with tf.convert_to_tensor."
        )
    values, indices = grouped_allgather([slices.values, slices.indices], name, process_set=process_set)
    gathered = tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)
    return divided_by_size(gathered, process_set) if op is Average else gathered


def divided_by_size(tensor: Any, process_set: ProcessSet) -> Any:
    """A tensor, or `tf.IndexedSlices`, divided by the number of ranks that there are when the graph runs."""
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(divided_by_size(tensor.values, process_set), tensor.indices, tensor.dense_shape)
    return tensor / tf.cast(_number(process_set.size), tensor.dtype)


def _rows(tensor: Tensor) -> Any:
    value = tf.convert_to_tensor(tensor)
    if value.shape.rank == 0:
        raise ConfigurationError("this collective works on rows, and the tensor is a single number (0 dimensions).")
    return value


def _any_rows(value: Any) -> Any:
    """The static shape of tensors that differ from this one in their number of rows."""
    return None if value.shape.rank is None else [None, *value.shape[1:]]


def _gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"
