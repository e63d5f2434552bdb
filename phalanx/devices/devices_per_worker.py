"""Several devices per worker, for one compiled program that spans the devices of all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.config.environment_variables import CPU_DEVICES, DEVICES_PER_WORKER, HOST_GPUS, JAX_THREADS, VISIBLE_GPUS
from phalanx.devices.cpu_devices import THREADS_OF_DEVICE
from phalanx.errors import ConfigurationError


def worker_device_variables(
    threads: Sequence[int], devices_per_worker: int, gpus: int, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """The variables that give each local worker its devices: different GPUs, or parts of the CPU if there are none.

    Args:
        threads: Number of threads of each local worker.
        devices_per_worker: Number of devices per worker.
        gpus: Number of GPUs that this host's processes may use.
        environ: The current environment, where CUDA_VISIBLE_DEVICES names the GPUs.

    Raises: ConfigurationError if there are GPUs, but too few.
    """
    workers = len(threads)
    if not gpus:
        # The devices of a process wait for each other in its thread pool, and starve if they fill it.
        return [
            {
                DEVICES_PER_WORKER: str(devices_per_worker),
                CPU_DEVICES: str(devices_per_worker),
                JAX_THREADS: environ.get(JAX_THREADS) or str(max(own, THREADS_OF_DEVICE * devices_per_worker)),
            }
            for own in threads
        ]
    if workers * devices_per_worker > gpus:
        raise ConfigurationError(
            f"--devices-per-worker {devices_per_worker}: {workers} workers need {workers * devices_per_worker} GPUs, "
            f"and this host has {gpus}. Start fewer workers here, give each fewer devices, or set {VISIBLE_GPUS}=-1 to "
            f"compute on CPUs."
        )
    names = (environ.get(VISIBLE_GPUS) or ",".join(map(str, range(gpus)))).split(",")
    own = [names[worker * devices_per_worker : (worker + 1) * devices_per_worker] for worker in range(workers)]
    return [
        {DEVICES_PER_WORKER: str(devices_per_worker), HOST_GPUS: ",".join(names[:gpus]), VISIBLE_GPUS: ",".join(chosen)}
        for chosen in own
    ]


def check_single_device(strategy: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if this process has several devices, because a strategy with replicas would use one."""
    count = environ.get(DEVICES_PER_WORKER, "1")
    if count != "1":
        raise ConfigurationError(
            f"{strategy} computes on one device of each worker, and `phalanx run --devices-per-worker {count}` gives "
            f"it {count}, for one program over all devices. On JAX, use MirroredStrategy(engine='spmd'), "
            f"ShardedStrategy or ModelParallelStrategy. Or leave out --devices-per-worker and start more workers."
        )
