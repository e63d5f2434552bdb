"""This process's ranks in the job, and the libraries behind the collectives. Names and semantics are Horovod's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.cluster import timeline_relay
from phalanx.errors import UnsupportedError
from phalanx.horovod.common import process_sets as sets
from phalanx.horovod.horovod_job import current_job, is_joined, join_job, leave_job


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job with the other processes; do nothing if this process has already joined.

    TF_CONFIG (which `phalanx run` sets), Slurm, MPI or Kubernetes describe the job; without any of them, this process
    is alone. Returns when all processes have joined, after at most PHALANX_RENDEZVOUS_TIMEOUT seconds.

    Args:
        comm: In Horovod, a part of an MPI job. Must be None, since there is no MPI: use a process set.
        process_sets: `ProcessSet`s to register, or "dynamic", which has no effect: they can always be registered.

    Raises:
        UnsupportedError: `comm` is given.
        RendezvousError: a task did not join in time.
        ConfigurationError, DisagreementError: as for a strategy.
    """
    if comm:
        raise UnsupportedError(
            "hvd.init(comm=...) needs MPI; Phalanx does not use MPI. Use hvd.add_process_set(ranks)."
        )
    fresh = not is_joined()
    job = join_job()
    if fresh:
        sets.reset_for_job(job.membership.world_size)
    if process_sets is not None and process_sets != "dynamic":
        sets.add_process_sets(process_sets)


def shutdown() -> None:
    """Leave the job and notify the other processes. Called automatically at the end of the program."""
    sets.unregister_all()
    leave_job()


def regroup() -> None:
    """Join the next generation of members of an elastic job; rank and size can change.

    Process sets are no longer registered, as after `shutdown` and `init`, which Horovod calls here.

    Raises: as `HorovodJob.regroup`.
    """
    sets.unregister_all()
    job = current_job()
    job.regroup()
    sets.reset_for_job(job.membership.world_size)


def is_initialized() -> bool:
    """Return whether `init` has been called without a later `shutdown`."""
    return is_joined()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start recording this process, as HOROVOD_TIMELINE does from the beginning.

    All ranks to be recorded must call this. Ranks on hosts other than rank 0's are recorded only if rank 0 is.

    Args:
        file_path: File on the host of rank 0; overwritten.
        mark_cycles: Whether to mark each round of negotiation.

    Raises:
        ValueError: before `init`, or while a timeline is being recorded.
        ConfigurationError: the file cannot be written.
    """
    current_job().start_timeline(Path(file_path), marks_cycles=mark_cycles)


def stop_timeline() -> None:
    """Stop recording and write the timeline. Raises ValueError before `init`."""
    current_job()
    timeline_relay.stop_recording()


def rank() -> int:
    """Return this process's number in the job, from 0. Raises ValueError before `init`, as do the functions below."""
    return current_job().membership.rank


def size() -> int:
    """Return the number of processes."""
    return current_job().membership.world_size


def local_rank() -> int:
    """Return this process's number among the processes on its host."""
    return current_job().membership.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return len(current_job().membership.local_ranks)


def cross_rank() -> int:
    """Return this process's number among the processes with the same local rank on all hosts."""
    return _peers_across().index(rank())


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return len(_peers_across())


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes."""
    membership = current_job().membership
    return len({len(membership.ranks_on(host)) for host in membership.hosts}) == 1


def _peers_across() -> Sequence[int]:
    membership = current_job().membership
    local = membership.local_rank
    by_host = [membership.ranks_on(host) for host in membership.hosts]
    return [ranks[local] for ranks in by_host if local < len(ranks)]


# The libraries that Horovod was built with. Phalanx has its own collectives and uses none of them.


def mpi_threads_supported() -> bool:
    """Return whether other threads may use MPI at the same time: always True, since Phalanx does not use it."""
    current_job()
    return True


def _is_not_used() -> bool:
    """Return whether this library runs the collectives or was built in: always False. Phalanx itself sends arrays.

    (A job started by `mpirun` is recognized. Tensors on GPUs pass through host memory.)
    """
    return False


def nccl_built() -> int:
    """Return the version of NCCL as a number: 0 for none."""
    return 0


mpi_enabled = _is_not_used
mpi_built = _is_not_used
gloo_enabled = _is_not_used
gloo_built = _is_not_used
ddl_built = _is_not_used
ccl_built = _is_not_used
cuda_built = _is_not_used
rocm_built = _is_not_used

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
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
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
