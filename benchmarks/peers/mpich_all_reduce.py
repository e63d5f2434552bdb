"""All-reduce of MPICH between local processes: `mpiexec -n 2 python -m benchmarks.peers.mpich_all_reduce`.

It merges into a separate array, as Phalanx does. MPICH busy-waits, so each process needs a core.
"""

from __future__ import annotations

import os

import numpy as np
from mpi4py import MPI

from benchmarks.all_reduce import SIZES, time_calls
from benchmarks.timing import write_result


def main() -> None:
    world = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    times = {}
    for size, count in SIZES.items():
        source, out = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32)

        def call(source: np.ndarray = source, out: np.ndarray = out) -> None:
            world.Allreduce(source, out)

        times[str(size)] = time_calls(call, world.Barrier, count)
    if world.rank == 0:
        write_result({"MPICH": times})


if __name__ == "__main__":
    main()
