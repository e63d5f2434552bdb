"""Horovod's interface for NumPy arrays: `import phalanx.horovod.numpy as hvd`. Horovod itself has none."""

from __future__ import annotations

from phalanx.collectives.host.argument_checks import native
from phalanx.horovod import elastic, exported_names
from phalanx.horovod.compressors import Compression
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.framework_bindings import ARRAY_FUNCTIONS, ArrayFramework, poll, synchronize
from phalanx.horovod.operations import barrier, join

_function = ArrayFramework(__name__, native, lambda array: array).make_collective_function

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

__all__ = [
    *exported_names.__all__,
    *ARRAY_FUNCTIONS,
    "Compression",
    "barrier",
    "elastic",
    "join",
    "poll",
    "synchronize",
]
