"""Horovod's interface for TensorFlow: `import phalanx.horovod.tensorflow as hvd`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from phalanx.horovod import exported_names, visible_gpus
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.gradient_reduction import GradientReduction
from phalanx.horovod.operations import Average
from phalanx.horovod.tensorflow import elastic, mpi_ops
from phalanx.horovod.tensorflow.compression import Compression
from phalanx.horovod.tensorflow.functions import (  # type: ignore[assignment]  # two take more arguments here
    BroadcastGlobalVariablesHook,
    allgather_object,  # noqa: F401  # in the shared `__all__`
    broadcast_global_variables,
    broadcast_object,  # noqa: F401
    broadcast_object_fn,
    broadcast_variables,
)
from phalanx.horovod.tensorflow.mpi_ops import *  # noqa: F403
from phalanx.horovod.tensorflow.session_optimizer import GradientAccumulation, SessionOptimizer
from phalanx.horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

init = visible_gpus.init_for("tensorflow")
"""`basics.init`; also selects the GPU of the local rank for this process."""


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """See `phalanx.horovod.keras.DistributedOptimizer`; for Keras optimizers, with Keras on TensorFlow.

    It also accepts and wraps TensorFlow 1 optimizers (`tf.compat.v1.train`). Their gradients are reduced in
    `compute_gradients`. With `backward_passes_per_step`, also run `tf.compat.v1.local_variables_initializer()`.

    The arguments are in the order of `horovod.tensorflow`; `use_locking` is for TensorFlow 1 optimizers.
    """
    reduction = GradientReduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return SessionOptimizer(
            optimizer,
            reduction,
            scale_local_gradients=scale_local_gradients,
            accumulation=GradientAccumulation(backward_passes_per_step, average=average_aggregated_gradients)
            if backward_passes_per_step > 1
            else None,
            name=name,
            use_locking=use_locking,
        )
    from phalanx.horovod.keras.keras_optimizer import OptimizerOptions, distribute_optimizer

    options = OptimizerOptions(backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)
    return distribute_optimizer(optimizer, reduction, options)


def SyncBatchNormalization(**kwargs: Any) -> Any:
    """Create a layer, see `phalanx.horovod.keras.SyncBatchNormalization`."""
    from phalanx.horovod.keras.sync_batch_normalization import SyncBatchNormalization as of_keras

    return of_keras(**kwargs)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether Adasum can combine this number of ranks."""
    return num_rank > 0 and not num_rank & (num_rank - 1)


__all__ = [
    *exported_names.__all__,
    *mpi_ops.__all__,
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "broadcast_global_variables",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_num_rank_power_of_2",
    "elastic",
]
