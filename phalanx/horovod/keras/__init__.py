"""Horovod's interface for Keras 3, on every backend: `import phalanx.horovod.keras as hvd`."""

from __future__ import annotations

import keras

from phalanx.horovod import exported_names, visible_gpus
from phalanx.horovod.compressors import Compression
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.keras import callbacks, elastic, keras_functions
from phalanx.horovod.keras.keras_functions import *  # noqa: F403
from phalanx.horovod.keras.keras_optimizer import DistributedOptimizer, PartialDistributedOptimizer
from phalanx.horovod.keras.sync_batch_normalization import SyncBatchNormalization
from phalanx.horovod.operations import barrier, join

init = visible_gpus.init_for(keras.backend.backend())
"""`basics.init`; also selects the GPU of the local rank for this process."""

__all__ = [
    *exported_names.__all__,
    *keras_functions.__all__,
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "barrier",
    "callbacks",
    "elastic",
    "join",
]
