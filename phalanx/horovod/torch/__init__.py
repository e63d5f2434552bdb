"""Horovod's interface for PyTorch: `import phalanx.horovod.torch as hvd`."""

from __future__ import annotations

from phalanx.horovod import exported_names, visible_gpus
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.torch import elastic
from phalanx.horovod.torch.compression import Compression
from phalanx.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from phalanx.horovod.torch.mpi_ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from phalanx.horovod.torch.optimizer import DistributedOptimizer
from phalanx.horovod.torch.sync_batch_norm import SyncBatchNorm

init = visible_gpus.init_for("torch")

__all__ = [
    *exported_names.__all__,
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
