"""Horovod's interface for TensorFlow: `import phalanx.horovod.tensorflow as hvd`."""

from __future__ import annotations

from typing import Any

from phalanx.horovod import exported_names, visible_gpus
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.operations import Average
from phalanx.horovod.process_sets import ProcessSet, global_process_set
from phalanx.horovod.tensorflow import elastic
from phalanx.horovod.tensorflow.compression import Compression
from phalanx.horovod.tensorflow.functions import broadcast_object_fn, broadcast_variables
from phalanx.horovod.tensorflow.mpi_ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from phalanx.horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

init = visible_gpus.init_for("tensorflow")


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
    """See `phalanx.horovod.keras.DistributedOptimizer`; for Keras optimizers, while Keras runs on TensorFlow. Arguments
    stand in the order of `horovod.tensorflow`; `use_locking` means nothing."""
    from phalanx.horovod.keras.optimizer import DistributedOptimizer as of_keras

    return of_keras(
        optimizer,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def SyncBatchNormalization(**kwargs: Any) -> Any:
    """A layer, see `phalanx.horovod.keras.SyncBatchNormalization`."""
    from phalanx.horovod.keras.sync_batch_normalization import SyncBatchNormalization as of_keras

    return of_keras(**kwargs)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether Adasum can merge so many ranks."""
    return num_rank > 0 and not num_rank & (num_rank - 1)


__all__ = [
    *exported_names.__all__,
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_num_rank_power_of_2",
    "elastic",
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
