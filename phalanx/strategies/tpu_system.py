"""The TPUs of a job: connecting the hosts of a slice, and the topology that programs for `tf.tpu` query."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.resolvers.tpu import TPUClusterResolver
from phalanx.errors import ConfigurationError
from phalanx.strategies.spmd_job import join_spmd_job
from phalanx.training.replica import Replica

Array = np.ndarray[Any, Any]


class Topology:
    """The TPU cores of a job (`tf.tpu.experimental.Topology`).

    Args:
        device_coordinates: Array of shape (hosts, cores per host, 4): the coordinates x, y, z of each core in the
            slice, and its number on its chip.
    """

    def __init__(self, device_coordinates: Array):
        self.device_coordinates = device_coordinates

    @property
    def mesh_shape(self) -> Array:
        """The size of the slice along each axis of `device_coordinates`."""
        return np.asarray(self.device_coordinates.max(axis=(0, 1)) + 1)

    @property
    def mesh_rank(self) -> int:
        """Number of dimensions of the mesh."""
        return int(self.device_coordinates.shape[2])

    @property
    def num_tasks(self) -> int:
        """Number of hosts."""
        return int(self.device_coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """Number of cores per task."""
        return int(self.device_coordinates.shape[1])

    def __repr__(self) -> str:
        return f"<Topology: {self.num_tasks} hosts with {self.num_tpus_per_task} cores, mesh {tuple(self.mesh_shape)}>"


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Connect the hosts of the slice, and find all TPU cores (`tf.tpu.experimental.initialize_tpu_system`).

    `TPUStrategy` does this itself. JAX initializes TPUs on first use, and calling this again loses nothing on them. All
    hosts must call this before they compute anything.

    Args:
        cluster_resolver: See `TPUStrategy`.

    Raises: the same errors as `TPUStrategy`.
    """
    join_tpu_job("initialize_tpu_system", cluster_resolver)
    import jax

    return topology_of(jax.devices())


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Do nothing (`tf.tpu.experimental.shutdown_tpu_system`): JAX frees the TPUs when the process exits, and has no
    function that does so earlier."""


def join_tpu_job(caller: str, cluster_resolver: ClusterResolver | None) -> Replica:
    """Join the hosts of the slice, and return the replica of this process.

    Args:
        caller: Name of the function or class that the user called, for messages.
        cluster_resolver: Resolver of the hosts. None: a `TPUClusterResolver`.

    Raises: ConfigurationError if there is no TPU; else see `join_spmd_job`.
    """
    replica = join_spmd_job(caller, TPUClusterResolver() if cluster_resolver is None else cluster_resolver)
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
