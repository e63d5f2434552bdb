"""The names that the interfaces of all frameworks share, for them to export."""

from __future__ import annotations

from phalanx.horovod.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from phalanx.horovod.exceptions import HorovodInternalError
from phalanx.horovod.object_collectives import allgather_object, broadcast_object
from phalanx.horovod.operations import Adasum, Average, Max, Min, Product, Sum
from phalanx.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from phalanx.horovod.run_function import run

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
