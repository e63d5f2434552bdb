"""The TPUs of a job: the hosts of a slice meet, and what programs for `tf.tpu` ask about them."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.resolvers.tpu import TPUClusterResolver
from phalanx.errors import ConfigurationError
from phalanx.strategies.spanning_job import join_spanning_job
from phalanx.training.replica import Replica

Array = np.ndarray[Any, Any]


class Topology:
    """The TPU cores of a job (`tf.tpu.experimental.Topology`).

    Args:
        device_coordinates: Of shape (hosts, cores of a host, 4): the place of each core in the slice as x, y, z, and
            its number on its chip.
    """

    def __init__(self, device_coordinates: Array):
        self.device_coordinates = device_coordinates

    @property
    def mesh_shape(self) -> Array:
        """The size of the slice along each axis of `device_coordinates`."""
        return np.asarray(self.device_coordinates.max(axis=(0, 1)) + 1)

    @property
    def mesh_rank(self) -> int:
        """The number of dimensions of the mesh."""
        return int(self.device_coordinates.shape[2])

    @property
    def num_tasks(self) -> int:
        """The number of hosts."""
        return int(self.device_coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """The number of cores of each task."""
        return int(self.device_coordinates.shape[1])

    def __repr__(self) -> str:
        return f"<Topology: {self.num_tasks} hosts with {self.num_tpus_per_task} cores, mesh {tuple(self.mesh_shape)}>"


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Meet the other hosts of the slice, and find all TPU cores (`tf.tpu.experimental.initialize_tpu_system`).

    `TPUStrategy` does so itself. JAX initializes TPUs when they are first used, and nothing on them is lost if this is
    called again. All hosts must call it, before anything is computed.

    Args:
        cluster_resolver: See `TPUStrategy`.

    Raises: as `TPUStrategy`.
    """
    join_tpu_job("initialize_tpu_system", cluster_resolver)
    import jax

    return topology_of(jax.devices())


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Does nothing (`tf.tpu.experimental.shutdown_tpu_system`): JAX frees the TPUs at the end of the process, and has
    no call that does it earlier."""


def join_tpu_job(caller: str, cluster_resolver: ClusterResolver | None) -> Replica:
    """This process's place among the hosts of the slice.

    Args:
        caller: What the user called, for messages.
        cluster_resolver: None: a `TPUClusterResolver`.

    Raises: ConfigurationError if there is no TPU; else see `join_spanning_job`.
    """
    replica = join_spanning_job(caller, TPUClusterResolver() if cluster_resolver is None else cluster_resolver)
    import jax

    device = jax.devices()[0]
    if device.platform != "tpu":
        raise ConfigurationError(
            f"{caller}: there is no TPU; JAX computes on {jax.device_count()} device(s) of the kind "
            f"{device.device_kind!r}. On these write ModelParallelStrategy() or ShardedStrategy(), which train in the "
            f"same way, or MirroredStrategy(). On a TPU's host install jax[tpu], and leave JAX_PLATFORMS unset."
        )
    return replica


def topology_of(devices: Any) -> Topology:
    """The topology of JAX's devices."""
    by_host: dict[int, list[Any]] = {}
    for device in devices:
        by_host.setdefault(device.process_index, []).append(device)
    places = [[_place(device) for device in by_host[host]] for host in sorted(by_host)]
    return Topology(np.array(places))


def _place(device: Any) -> list[int]:
    x, y, z = (*device.coords, 0, 0)[:3]
    return [x, y, z, device.core_on_chip]
