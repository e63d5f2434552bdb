"""Horovod's interface for JAX: `import phalanx.horovod.jax as hvd`. Horovod itself has none.

The functions take and give `jax.Array`s, outside of `jax.jit`: a compiled function cannot wait for other processes.
Compute gradients in one compiled function, merge them, and apply them in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.horovod import elastic, exported_names, operations, step_reports
from phalanx.horovod.compression import Compression
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.interface import Interface, check_kept, poll, synchronize
from phalanx.horovod.operation_request import Array, HorovodOp
from phalanx.horovod.operations import Average, barrier, check_op, join
from phalanx.horovod.process_sets import ProcessSet, global_process_set


def _to_host(tensor: Any) -> Array:
    if isinstance(tensor, jax.core.Tracer):
        raise UnsupportedError(
            "A collective of hvd was called inside a function that JAX compiles or transforms (jit, grad, vmap, scan). "
            "Such a function cannot wait for other processes: compute the gradients in one jitted function, call hvd "
            "outside, and apply them in a second jitted function."
        )
    return np.asarray(tensor)


def _from_host(array: Array) -> Any:
    tensor = jnp.array(array)  # a copy: JAX must own what it computes with
    check_kept(array, tensor.dtype.name)
    return tensor


_interface = Interface(_to_host, _from_host)

allreduce = _interface.allreduce
allreduce_async = _interface.allreduce_async
grouped_allreduce = _interface.grouped_allreduce
grouped_allreduce_async = _interface.grouped_allreduce_async
allgather = _interface.allgather
allgather_async = _interface.allgather_async
grouped_allgather = _interface.grouped_allgather
grouped_allgather_async = _interface.grouped_allgather_async
broadcast = _interface.broadcast
broadcast_async = _interface.broadcast_async
alltoall = _interface.alltoall
alltoall_async = _interface.alltoall_async
reducescatter = _interface.reducescatter
reducescatter_async = _interface.reducescatter_async
grouped_reducescatter = _interface.grouped_reducescatter
grouped_reducescatter_async = _interface.grouped_reducescatter_async


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """A tree of arrays as rank `root_rank` has it (parameters, an optimizer's state), on every rank; travels as one.

    Leaves that are no arrays become such; the trees must be alike on all ranks.
    """
    leaves, structure = jax.tree.flatten(params)
    pending = operations.broadcast(
        [_to_host(leaf) for leaf in leaves], root_rank, name="broadcast_parameters", process_set=process_set, wake=False
    )
    return jax.tree.unflatten(structure, map(_from_host, pending.wait()))


class _Transformation(NamedTuple):
    """What Optax calls a `GradientTransformationExtraArgs`: two functions."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def DistributedOptimizer(
    optimizer: Any,
    compression: Any = Compression.none,
    op: HorovodOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Any:
    """An Optax optimizer whose `update` merges the gradients over the ranks first, all of them as one.

    `update` must be called outside of `jax.jit`; what it does with the merged gradients is compiled.

    Args:
        optimizer: an `optax.GradientTransformation`.
        compression: see `Compression`.
        op: how to merge.
        gradient_predivide_factor: an average divides by this before the sum, and by the rest after it.
        name: of the collective; needed if several threads update at the same time.

    Raises: ConfigurationError if arguments do not fit together; from `update`, UnsupportedError inside `jax.jit`.
    """
    op = check_op(op)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ConfigurationError(f"gradient_predivide_factor is for op Average, not {op.value}.")
    apply = jax.jit(optimizer.update)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        merged = merge_gradients(
            leaves,
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
            name=name,
        )
        return apply(jax.tree.unflatten(structure, merged), state, params, **extra)

    # Of Optax's own class, so that `optax.chain` and its kin take it.
    kind = type(optimizer) if hasattr(optimizer, "_fields") else _Transformation
    return kind(optimizer.init, update)


def merge_gradients(
    gradients: Sequence[Any],
    *,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: HorovodOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[Any]:
    """Gradients merged over the ranks, all of them as one; None stays None."""
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    average = op is Average
    results = step_reports.merged(
        lambda: grouped_allreduce(
            [gradients[index] for index in present],
            name=name,
            compression=compression,
            op=op,
            prescale_factor=1.0 / gradient_predivide_factor if average else 1.0,
            postscale_factor=gradient_predivide_factor if average else 1.0,
            process_set=process_set,
        )
    )
    merged = list(gradients)
    for index, result in zip(present, results, strict=True):
        merged[index] = result
    return merged


__all__ = [
    *exported_names.__all__,
    "Compression",
    "DistributedOptimizer",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_parameters",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]
