"""Horovod's interface for NumPy arrays: `import phalanx.horovod.numpy as hvd`. Horovod itself has none."""

from __future__ import annotations

from phalanx.collectives.host.argument_checks import native
from phalanx.horovod import elastic, exported_names
from phalanx.horovod.compression import Compression
from phalanx.horovod.exported_names import *  # noqa: F403
from phalanx.horovod.interface import Interface, poll, synchronize
from phalanx.horovod.operations import barrier, join

_interface = Interface(native, lambda array: array)

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

__all__ = [
    *exported_names.__all__,
    "Compression",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
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
