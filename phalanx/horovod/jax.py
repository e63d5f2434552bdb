"""Horovod's interface for JAX: `import phalanx.horovod.jax as hvd`. Horovod itself has none.

The functions take and return `jax.Array`s outside of `jax.jit`: a compiled function cannot wait for other processes.
Compute gradients in one compiled function, reduce them, and apply them in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.arrays.tree import map_non_none
from phalanx.horovod import elastic, exported_names, operations, step_reports
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.compressors import Compression
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.framework_bindings import (
    ARRAY_FUNCTIONS,
    ArrayFramework,
    check_integers_preserved,
    poll,
    synchronize,
)
from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.jax_tracers import refuse_tracer
from phalanx.horovod.operation_request import Array, HorovodOp, OperationKind
from phalanx.horovod.operations import Average, barrier, join


def _to_array(tensor: Any) -> Array:
    refuse_tracer(tensor)
    return np.asarray(tensor)


def _from_array(array: Array) -> Any:
    tensor = jnp.array(array)  # a copy: JAX must own its inputs
    check_integers_preserved(array, tensor.dtype.name)
    return tensor


_framework = ArrayFramework(__name__, _to_array, _from_array)
_function = _framework.make_collective_function

allreduce = _function("allreduce")
allreduce_async = _function("allreduce_async")
grouped_allreduce = _function("grouped_allreduce")
grouped_allreduce_async = _function("grouped_allreduce_async")
allgather = _function("allgather")
allgather_async = _function("allgather_async")
grouped_allgather = _function("grouped_allgather")
grouped_allgather_async = _function("grouped_allgather_async")
broadcast = _function("broadcast")
broadcast_async = _function("broadcast_async")
alltoall = _function("alltoall")
alltoall_async = _function("alltoall_async")
reducescatter = _function("reducescatter")
reducescatter_async = _function("reducescatter_async")
grouped_reducescatter = _function("grouped_reducescatter")
grouped_reducescatter_async = _function("grouped_reducescatter_async")


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Send a tree of arrays (parameters, the state of an optimizer) from one rank to all; they travel together.

    Args:
        params: The tree, with the same structure on all ranks. Leaves that are not arrays become arrays. Keys of
            `jax.random.key` stay keys.
        root_rank: Rank in the job whose tree is sent.
        process_set: The ranks that take part.

    Returns: the tree of `root_rank`.
    """
    leaves, structure = jax.tree.flatten(params)
    keys = {i: jax.random.key_impl(leaf) for i, leaf in enumerate(leaves) if _is_key(leaf)}
    leaves = [jax.random.key_data(leaf) if i in keys else leaf for i, leaf in enumerate(leaves)]
    received = operations.run(
        OperationKind.BROADCAST,
        list(map(_to_array, leaves)),
        name="broadcast_parameters",
        root_rank=root_rank,
        process_set=process_set,
    )
    arrays = [_from_array(array) for array in received]
    for i, kind in keys.items():
        arrays[i] = jax.random.wrap_key_data(arrays[i], impl=kind)
    return jax.tree.unflatten(structure, arrays)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class _Transformation(NamedTuple):
    """The two functions of an Optax `GradientTransformationExtraArgs`."""

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
    """Return an Optax optimizer whose `update` first reduces the gradients over the ranks, all of them together.

    Call `update` outside of `jax.jit`; its computation on the reduced gradients is compiled.

    Args:
        optimizer: An `optax.GradientTransformation`.
        compression: A compressor, see `Compression`.
        op: The reduction.
        gradient_predivide_factor: See `GradientReduction`.
        process_set: The ranks that train together.
        name: Name of the collective; needed if several threads update at the same time.

    Raises: ConfigurationError if options contradict each other; from `update`, UnsupportedError inside `jax.jit`.
    """
    reduction = GradientReduction(compression, op, gradient_predivide_factor, False, process_set)
    apply = jax.jit(optimizer.update)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        return apply(jax.tree.unflatten(structure, reduce_gradients(leaves, reduction, name)), state, params, **extra)

    # Of Optax's class, so that `optax.chain` and similar functions accept it.
    kind = type(optimizer) if hasattr(optimizer, "_fields") else _Transformation
    return kind(optimizer.init, update)


def reduce_gradients(gradients: Sequence[Any], reduction: GradientReduction, name: str | None = None) -> list[Any]:
    """Reduce gradients over the ranks, all of them together; None stays None.

    Args:
        gradients: Arrays.
        reduction: The reduction of the gradients.
        name: Name of the collective.
    """

    def reduce(present: list[Any]) -> list[Any]:
        arguments = reduction.to_arguments(name)
        return step_reports.report_reduction(
            lambda: _framework.run(OperationKind.ALLREDUCE, present, arguments, reduction.compression)
        )

    return map_non_none(reduce, gradients)


__all__ = [
    *exported_names.__all__,
    *ARRAY_FUNCTIONS,
    "Compression",
    "DistributedOptimizer",
    "barrier",
    "broadcast_parameters",
    "elastic",
    "join",
    "poll",
    "synchronize",
]
