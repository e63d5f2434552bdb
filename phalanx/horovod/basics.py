"""Who and where this process is in the job, and what this interface is built on. Names and meaning are Horovod's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.cluster import timeline_relay
from phalanx.errors import UnsupportedError
from phalanx.horovod import process_sets as sets
from phalanx.horovod.horovod_job import current, is_joined, join_world, leave_world


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meet the other processes of the job; does nothing where that is done already.

    The job comes from TF_CONFIG (which `phalanx run` sets), Slurm, MPI or Kubernetes; without any of them this process
    is alone. Returns when all have come, at most PHALANX_RENDEZVOUS_TIMEOUT seconds later.

    Args:
        comm: Horovod's way to take a part of an MPI job. Here only None, since there is no MPI: use a process set.
        process_sets: `ProcessSet`s that are registered at once, or "dynamic", which they always are here.

    Raises:
        UnsupportedError: `comm` is given.
        RendezvousError: a task did not come in time.
        ConfigurationError, DisagreementError: as of a strategy.
    """
    if comm:
        raise UnsupportedError("hvd.init(comm=...) needs MPI; Phalanx does without. Use hvd.add_process_set(ranks).")
    fresh = not is_joined()
    world = join_world()
    if fresh:
        sets.begin(world.membership.world_size)
    if process_sets is not None and process_sets != "dynamic":
        for process_set in process_sets:
            sets.add_process_set(process_set)


def shutdown() -> None:
    """Leave the job; the other processes are told. Called at the end of the program by itself."""
    sets.end()
    leave_world()


def regroup() -> None:
    """In an elastic job: leave the present members and meet the next ones; rank and size are new then.

    Process sets are not registered any more, as after `shutdown` and `init`, which is what Horovod does here.

    Raises: as `World.regroup`.
    """
    sets.end()
    world = current()
    world.regroup()
    sets.begin(world.membership.world_size)


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return is_joined()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what this process does from now on, as HOROVOD_TIMELINE does from the start (docs/timeline.md).

    All ranks that shall be in the timeline must call; those of other hosts than rank 0's need rank 0 in it.

    Args:
        file_path: on the host of rank 0; made anew.
        mark_cycles: whether each round of negotiation is marked.

    Raises:
        ValueError: before `init`, or while a timeline is being recorded.
        ConfigurationError: the file cannot be written.
    """
    current().start_timeline(Path(file_path), marks_cycles=mark_cycles)


def stop_timeline() -> None:
    """Record no more, and write what has been recorded. Raises ValueError before `init`."""
    current()
    timeline_relay.stop_recording()


def rank() -> int:
    """This process's number among all, from 0. Raises ValueError before `init`, as all that follow."""
    return current().membership.rank


def size() -> int:
    """The number of processes."""
    return current().membership.world_size


def local_rank() -> int:
    """This process's number among those of its host."""
    return current().membership.local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return len(current().membership.local_ranks)


def cross_rank() -> int:
    """This process's number among those of other hosts that have the same local rank."""
    return _peers_across().index(rank())


def cross_size() -> int:
    """The number of hosts that have a process of this local rank."""
    return len(_peers_across())


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of processes."""
    membership = current().membership
    return len({len(membership.ranks_on(host)) for host in membership.hosts}) == 1


def _peers_across() -> Sequence[int]:
    membership = current().membership
    local = membership.local_rank
    by_host = [membership.ranks_on(host) for host in membership.hosts]
    return [ranks[local] for ranks in by_host if local < len(ranks)]


# What Horovod was built with. Here collectives are Phalanx's own, in Python: none of these libraries takes part.


def mpi_threads_supported() -> bool:
    """Whether other threads may use MPI meanwhile: they may, as MPI is not used."""
    current()
    return True


def mpi_enabled() -> bool:
    """Whether MPI carries the collectives: no."""
    return False


def mpi_built() -> bool:
    """Whether there is support for MPI: no. (A job that `mpirun` has started is understood all the same.)"""
    return False


def gloo_enabled() -> bool:
    """Whether gloo carries the collectives: no."""
    return False


def gloo_built() -> bool:
    """Whether there is support for gloo: no."""
    return False


def nccl_built() -> int:
    """The version of NCCL as a number: 0, there is none."""
    return 0


def ddl_built() -> bool:
    """Whether there is support for IBM's DDL: no."""
    return False


def ccl_built() -> bool:
    """Whether there is support for Intel's oneCCL: no."""
    return False


def cuda_built() -> bool:
    """Whether collectives run on CUDA devices: no, tensors pass through the host's memory."""
    return False


def rocm_built() -> bool:
    """Whether collectives run on ROCm devices: no."""
    return False
