"""Horovod's interface for TensorFlow: `import phalanx.horovod.tensorflow as hvd`."""

from __future__ import annotations

from typing import Any

from phalanx.horovod import names
from phalanx.horovod.names import *  # noqa: F403
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


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """See `phalanx.horovod.keras.DistributedOptimizer`; for Keras optimizers, while Keras runs on TensorFlow."""
    from phalanx.horovod.keras.optimizer import DistributedOptimizer as of_keras

    return of_keras(optimizer, *args, **kwargs)


def SyncBatchNormalization(**kwargs: Any) -> Any:
    """A layer, see `phalanx.horovod.keras.SyncBatchNormalization`."""
    from phalanx.horovod.keras.sync_batch_normalization import SyncBatchNormalization as of_keras

    return of_keras(**kwargs)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether Adasum can merge so many ranks."""
    return num_rank > 0 and not num_rank & (num_rank - 1)


__all__ = [
    *names.__all__,
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
