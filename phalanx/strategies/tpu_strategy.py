"""`TPUStrategy`: data-parallel training on all cores of a TPU slice."""

from __future__ import annotations

from typing import Any

from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.config.plan_request import PlanRequest
from phalanx.errors import UnsupportedError
from phalanx.strategies.device_meshes import mirrored_placement
from phalanx.strategies.spmd_job import with_mesh
from phalanx.strategies.strategy import Strategy
from phalanx.strategies.tpu_system import join_tpu_job
from phalanx.training.replica import single_replica
from phalanx.training.training_policy import TrainingPolicy


class TPUStrategy(Strategy):
    """The whole model on each TPU core, and batches divided over all cores (`tf.distribute.TPUStrategy`). JAX only.

    Start the program on every host of the slice. If a model does not fit on one core, use `ShardedStrategy` or
    `ModelParallelStrategy`, which find TPUs too. TPUs compute matrix products in bfloat16 by default: to get the
    numbers of a CPU or a GPU, set `jax.config.update("jax_default_matmul_precision", "highest")`. This strategy has
    been compiled for TPUs, but never run on one.

    Args:
        tpu_cluster_resolver: Resolver of the hosts. None: a `TPUClusterResolver`.
        experimental_device_assignment: None; for other values, see `ModelParallelStrategy(mesh_shape=...)`.
        experimental_spmd_xla_partitioning: Ignored; XLA always divides the program.

    Raises:
        ConfigurationError: there is no TPU; other causes as for `MultiWorkerMirroredStrategy`.
        UnsupportedError: Keras does not run on JAX, or a device assignment was given.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
    ):
        del experimental_spmd_xla_partitioning
        if experimental_device_assignment is not None:
            raise UnsupportedError(
                "TPUStrategy(experimental_device_assignment=...): JAX assigns the cores. To divide a model over "
                "several, write ModelParallelStrategy(mesh_shape=(data, model))."
            )
        # `phalanx plan --topology` compiles for TPUs on a machine that has none.
        is_planned = PlanRequest.from_environment() is not None
        replica = single_replica() if is_planned else join_tpu_job("TPUStrategy", tpu_cluster_resolver)
        placement = mirrored_placement()
        super().__init__(with_mesh(replica, placement), tpu_cluster_resolver, TrainingPolicy(placement=placement))
