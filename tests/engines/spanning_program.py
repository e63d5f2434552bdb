"""What a worker does that takes part in one JAX program over several processes, without Keras's models:

    phalanx run --workers 2 -m tests.engines.spanning_program DEVICES [HOW RANK]

HOW is what happens to a rank: it "dies", "fails", has used JAX "early", or sees "other" devices than the rest.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import jax
import numpy as np

from phalanx.cluster import resolve
from phalanx.strategies.current_job import join_job

STEPS = 50


def main(devices: int, how: str, victim: int) -> None:
    job = join_job(resolve(), None)
    rank, world_size = job.replica.rank, job.replica.world_size
    config: Any = jax.config
    if (how, victim) == ("other", rank):
        config.update("jax_num_cpu_devices", devices + 1)
    if (how, victim) == ("early", rank):
        jax.devices()
    job.connect_devices()
    job.connect_devices()
    assert (jax.local_device_count(), jax.device_count()) == (devices, devices * world_size)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = jax.jit(lambda x: (x + x.sum(), x.sum()), out_shardings=(rows, whole))
    own = np.arange(devices, dtype="float32") + devices * rank
    x = jax.make_array_from_process_local_data(rows, own)
    expected = np.arange(devices * world_size, dtype="float64")
    for number in range(STEPS):
        if (number, victim) == (STEPS // 2, rank):
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "fails":
                raise KeyError("a mistake of the program")
        x, total = step(x / (devices * world_size))
        expected /= devices * world_size
        np.testing.assert_allclose(float(total), expected.sum(), rtol=1e-4)
        expected += expected.sum()
    print("rank", rank, "has finished")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "", int(sys.argv[3]) if len(sys.argv) > 3 else -1)
