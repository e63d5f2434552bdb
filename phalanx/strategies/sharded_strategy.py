"""`ShardedStrategy`: data-parallel training of a model that is divided over the devices."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.engines.spmd.placement import REPLICA, SHARD, Placement, make_mesh
from phalanx.errors import ConfigurationError
from phalanx.strategies.device_meshes import mesh_devices
from phalanx.strategies.spmd_job import join_spmd_job, with_mesh
from phalanx.strategies.strategy import Strategy
from phalanx.training.training_policy import TrainingPolicy


class ShardedStrategy(Strategy):
    """One compiled program on all devices, each of which holds a part of the model (ZeRO, FSDP). JAX only.

    Training gives the numbers of a single device, with any batch size.

    Args:
        level: Parts of the model that are divided: 1: the state of the optimizer; 2: gradients too; 3: weights too,
            which each step gathers while it needs them.
        mesh_shape: Numbers (replicas, shards): each of the `replicas` groups of devices holds a whole model, divided
            over its `shards` devices. Devices of one host are adjacent, so groups no larger than a host gather weights
            within it. None: one group of all devices.

    Raises:
        ConfigurationError: the mesh does not fit the devices; or, before the first step, no variable of the model can
            be divided over it.
        UnsupportedError: Keras does not run on JAX.
    """

    def __init__(self, level: int = 3, mesh_shape: Sequence[int] | None = None):
        if level not in (1, 2, 3):
            raise ConfigurationError(
                f"ShardedStrategy(level={level!r}): it is 1 (the state of the optimizer is divided), 2 (gradients too) "
                f"or 3 (weights too)."
            )
        replica = join_spmd_job("ShardedStrategy")
        devices = mesh_devices()
        mesh = make_mesh(mesh_shape or (1, len(devices)), (REPLICA, SHARD), devices)
        placement = Placement(mesh, (REPLICA, SHARD), SHARD, level)
        super().__init__(with_mesh(replica, placement), policy=TrainingPolicy(placement=placement))
