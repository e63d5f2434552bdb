"""`MultiWorkerMirroredStrategy`: every device of every task of a cluster is a replica."""

from __future__ import annotations

from phalanx.cluster.resolvers.auto_resolver import as_resolver
from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.collectives.options import CommunicationImplementation, CommunicationOptions
from phalanx.compression import Compression
from phalanx.compression import resolve as resolve_compression
from phalanx.config.environment import process_environment
from phalanx.devices.devices_per_worker import check_single_device
from phalanx.errors import ConfigurationError
from phalanx.strategies.current_job import join_job
from phalanx.strategies.strategy import Strategy
from phalanx.strategies.task_replicas import task_devices
from phalanx.training.training_policy import TrainingPolicy


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the workers of a cluster (`tf.distribute.MultiWorkerMirroredStrategy`).

    A task has a replica for each of its GPUs, or one if it has none. If no launcher has started a process for each GPU,
    the task's process runs the same program again for the others, which have the same TF_CONFIG and print only errors
    to the terminal. PHALANX_TASK_REPLICAS sets another number of replicas.

    The constructor waits until all workers have created the strategy, for at most PHALANX_RENDEZVOUS_TIMEOUT seconds. A
    task of type `evaluator` trains alone.

    Args:
        cluster_resolver: Resolver of the cluster and this task. None: TF_CONFIG, or the environment of Slurm, MPI or
            Kubernetes; without any of them, this host trains alone.
        communication_options: Options of the communicator; see `CommunicationOptions`.
        communication: Older form of the options, a `CollectiveCommunication`.
        compression: Compression of gradients: "float16", "bfloat16", "int8", "top_k", "power_sgd", or an object of
            `phalanx.compression`. None: no compression.
        synchronized_batch_norm: Whether all `BatchNormalization` layers normalize over the global batch, as if they had
            `synchronized=True`. False: only those that have it.

    Raises:
        ConfigurationError: the description of the cluster is invalid; the message says where.
        RendezvousError: a task did not connect in time; the message names it.
        DisagreementError: tasks disagree on a value that must be equal.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        communication: CommunicationImplementation | None = None,
        compression: Compression | str | None = None,
        synchronized_batch_norm: bool = False,
    ):
        if communication is not None:
            if communication_options is not None:
                raise ConfigurationError("Pass communication_options or communication, not both.")
            communication_options = CommunicationOptions(implementation=communication)
        check_single_device(type(self).__name__, process_environment())
        resolver = as_resolver(cluster_resolver)
        policy = TrainingPolicy(resolve_compression(compression), synchronized_batch_norm=synchronized_batch_norm)
        if compression is not None and CommunicationOptions.of(communication_options).deterministic:
            raise ConfigurationError(
                "CommunicationOptions(deterministic=True) sums micro-batches with all their bits; compression="
                f"{compression!r} would round what each worker sends. Leave out one of the two."
            )
        self._job = join_job(resolver, communication_options, devices=task_devices(resolver))
        super().__init__(self._job.replica, resolver, policy)
