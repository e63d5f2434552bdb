"""Horovod's interface for PyTorch: `import phalanx.horovod.torch as hvd`."""

from __future__ import annotations

from phalanx.horovod import exported_names, visible_gpus
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.torch import elastic, mpi_ops
from phalanx.horovod.torch.compression import Compression
from phalanx.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from phalanx.horovod.torch.mpi_ops import *  # noqa: F403
from phalanx.horovod.torch.optimizer import DistributedOptimizer
from phalanx.horovod.torch.sync_batch_norm import SyncBatchNorm

init = visible_gpus.init_for("torch")
"""`basics.init`; also selects the GPU of the local rank for this process."""

__all__ = [
    *exported_names.__all__,
    *mpi_ops.__all__,
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
