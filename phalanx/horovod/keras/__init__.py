"""Horovod's interface for Keras 3, on every backend: `import phalanx.horovod.keras as hvd`."""

from __future__ import annotations

import keras

from phalanx.horovod import exported_names, visible_gpus
from phalanx.horovod.compression import Compression
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.keras import callbacks, elastic
from phalanx.horovod.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_variables,
    interface,
    load_model,
    reducescatter,
)
from phalanx.horovod.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from phalanx.horovod.keras.sync_batch_normalization import SyncBatchNormalization
from phalanx.horovod.operations import barrier, join

init = visible_gpus.init_for(keras.backend.backend())
grouped_allreduce = interface.grouped_allreduce
alltoall = interface.alltoall
grouped_allgather = interface.grouped_allgather
grouped_reducescatter = interface.grouped_reducescatter

__all__ = [
    *exported_names.__all__,
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "load_model",
    "reducescatter",
]
