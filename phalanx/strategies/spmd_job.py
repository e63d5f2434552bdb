"""The job of a strategy in which one compiled program spans the devices of all processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras

from phalanx.cluster.resolvers.auto_resolver import as_resolver
from phalanx.engines.spmd.placement import Placement
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.strategies.current_job import join_job
from phalanx.training.replica import Replica, single_replica


def join_spmd_job(strategy: str, cluster_resolver: Any = None) -> Replica:
    """Join the processes of the program; afterwards, `jax.devices()` lists the devices of all of them.

    All tasks of the job must call this when they start. Calling it again has no effect.

    Args:
        strategy: Name of the strategy in messages.
        cluster_resolver: Resolver of the processes. None: see `MultiWorkerMirroredStrategy`.

    Raises:
        UnsupportedError: Keras does not run on JAX, or the job is elastic.
        ConfigurationError: see `connect_processes`.
    """
    backend = keras.backend.backend()
    if backend != "jax":
        raise UnsupportedError(
            f"{strategy} compiles one program for many devices, which Keras does only on JAX; here it runs on "
            f"{backend!r}. Set KERAS_BACKEND=jax before Keras is imported, or train replicas with MirroredStrategy or "
            f"MultiWorkerMirroredStrategy, which run on every backend."
        )
    resolver = as_resolver(cluster_resolver)
    if not resolver.cluster_spec():
        return single_replica()
    job = join_job(resolver, None)
    job.connect_devices()
    return job.replica


def with_mesh(replica: Replica, placement: Placement) -> Replica:
    """The replica as one process of a program on this mesh.

    Raises: ConfigurationError if a process of the job has no device in the mesh.
    """
    if replica.world_size == 1:
        return replica
    processes = {device.process_index for device in placement.mesh.backend_mesh.devices.flatten()}
    if len(processes) < replica.world_size:
        idle = ", ".join(str(rank) for rank in range(replica.world_size) if rank not in processes)
        raise ConfigurationError(
            f"The mesh {placement} has no device of rank {idle}, and every process of the job takes part. Use the "
            f"devices of all processes, or start fewer."
        )
    return replace(replica, mesh_parts=placement.data_shards)
