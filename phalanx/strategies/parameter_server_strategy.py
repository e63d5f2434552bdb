"""`ParameterServerStrategy`: servers hold the variables and run the optimizer; workers compute gradients."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from phalanx.cluster import timeline_relay
from phalanx.cluster.resolvers.auto_resolver import as_resolver
from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.spec import CHIEF, EVALUATOR, PS, ClusterSpec
from phalanx.cluster.task_comparison import MIXED_BACKENDS, JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.compression import BFloat16, Compression, Float16
from phalanx.compression import resolve as resolve_compression
from phalanx.config.environment import process_environment, set_variables
from phalanx.config.job_config import JobConfig
from phalanx.coordinator.method_calls import MethodCalls
from phalanx.coordinator.worker_server import WorkerSettings
from phalanx.data import DistributedDataset, InputContext
from phalanx.data.distributed_dataset import DatasetDistribution
from phalanx.devices import gpu_figures
from phalanx.devices.devices_per_worker import check_single_device
from phalanx.devices.gpu_count import HIDE_GPUS
from phalanx.engines import prepare
from phalanx.errors import CollectiveTimeoutError, ConfigurationError, UnsupportedError
from phalanx.parameter_server.client.parameter_client import ParameterServerClient
from phalanx.parameter_server.partitioners import Partitioner
from phalanx.parameter_server.server.parameter_server import ParameterServer, snapshots_of
from phalanx.parameter_server.server.shard_group import RETURN_TIMEOUT_S, SNAPSHOT_INTERVAL_S
from phalanx.parameter_server.server_messages import UpdateRules
from phalanx.runtime import process_exit, progress, telemetry
from phalanx.strategies.strategy import Strategy
from phalanx.training import model_dispatch
from phalanx.training.program_effects.program_random_state import encode_random_state, restore_random_state
from phalanx.training.replica import single_replica
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker

logger = logging.getLogger(__name__)


class ParameterServerStrategy(Strategy):
    """Training with parameter servers (`tf.distribute.ParameterServerStrategy`).

    Servers hold the variables and run the optimizer. The first server assigns the batches of `fit` to the workers.
    There are two ways to run a job. Either only the task `chief` runs this program, and servers and workers run
    `phalanx.Server(...).join()`. Or every task runs the same program: on a task of type `ps`, the constructor serves
    until the job is over, then exits the process with code 0; on other tasks, it waits for the servers to start.

    Args:
        cluster_resolver: Resolver of the cluster and this task. None: TF_CONFIG, or the environment of Slurm, MPI or
            Kubernetes.
        variable_partitioner: Splits large variables along their first axis, so that several servers share them; see
            `MinSizePartitioner`.
        synchronous: Whether to merge all workers' gradients of a step into one update; `batch_size` is then the size of
            the global batch. False: each worker's gradients are one update.
        replicas_to_aggregate: Number of workers whose gradients make an update in synchronous training; gradients of
            slower workers are discarded and counted. None: all.
        staleness: Maximum steps that a worker may be ahead of the slowest in asynchronous training. None: no limit.
        overlap: Whether, in asynchronous training, workers compute the next step while they send gradients. A step then
            does not wait for the network, but its weights lack about twice as many updates: see
            docs/how-to/parameter-servers.md. No effect on models with tables whose rows are sent.
        refuse_nan: Whether to discard updates with non-finite values, log and count them. False: apply them.
        compression: "float16" or "bfloat16" (or `phalanx.compression.Float16()`, `BFloat16()`): the dtype in which
            gradients are sent.
        replication: 2: each server's shards have a replica on the next server, and an update is acknowledged when both
            have applied it. A killed server then costs no update and no wait for its restart. 1: no replicas.
        snapshot_dir: Directory for snapshots of each server's shards, from which a restarted server resumes. None:
            files of the launcher under `phalanx run`, which restarts killed servers; otherwise no snapshots, and losing
            a server ends the job.
        snapshot_seconds: Seconds between two snapshots; updates since the last one are lost with the server.
        embedding_rows: Whether to send only the rows of an `Embedding` that a batch uses. "auto": for tables of at
            least 1 MiB with 16 times as many rows as a batch looks up; True: for all tables that allow it; False: for
            none. The optimizer then does not update the state of other rows: see docs/how-to/parameter-servers.md.

    Raises:
        ConfigurationError: the description of the cluster is invalid, or has no `ps`.
        RendezvousError: a server did not connect in time; the message names it.
        DisagreementError: tasks disagree on a value that must be equal.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        synchronous: bool = False,
        replicas_to_aggregate: int | None = None,
        staleness: int | None = None,
        overlap: bool = False,
        refuse_nan: bool = True,
        compression: Compression | str | None = None,
        replication: int = 1,
        snapshot_dir: str | os.PathLike[str] | None = None,
        snapshot_seconds: float = SNAPSHOT_INTERVAL_S,
        embedding_rows: bool | str = "auto",
    ):
        check_single_device(type(self).__name__, process_environment())
        resolver = as_resolver(cluster_resolver)
        identity = identify_task(resolver)
        if identity.task.type == PS:
            set_variables(HIDE_GPUS)  # gradients arrive in host memory; the GPUs belong to the workers
            serve(identity, snapshot_dir, snapshot_seconds, replication)
            sys.exit(0)
        _check_replication(identity, replication)
        rules = _rules(identity, synchronous, replicas_to_aggregate, staleness, overlap, refuse_nan)
        cast = _cast(compression)
        if embedding_rows not in ("auto", True, False):
            raise ConfigurationError(f"embedding_rows is {embedding_rows!r}; write True, False or 'auto'.")
        # Workers connect to the servers only: there is no communicator between them.
        super().__init__(single_replica(), resolver)
        self._worker: ParameterServerWorker | None = None  # None on an evaluator, which trains alone
        if identity.task.type != EVALUATOR:
            return_timeout_s = RETURN_TIMEOUT_S if snapshot_dir is not None or replication > 1 else 0.0
            self._worker = join_as_worker(
                identity,
                rules,
                variable_partitioner,
                cast,
                embedding_rows if embedding_rows == "auto" else bool(embedding_rows),
                identity.config.return_timeout_s or return_timeout_s,
                is_replicated=replication > 1,
            )
            if identity.task.type == CHIEF and identity.config.secret and len(identity.tasks) > 1:
                self._admit_workers(self._worker)

    @classmethod
    def for_worker(cls, worker: ParameterServerWorker, resolver: ClusterResolver) -> ParameterServerStrategy:
        """Create the strategy of a worker that does not run the program itself."""
        strategy = cls.__new__(cls)
        Strategy.__init__(strategy, single_replica(), resolver)
        strategy._worker = worker
        return strategy

    def _admit_workers(self, worker: ParameterServerWorker) -> None:
        """As the chief: admit workers that do not run the program themselves."""
        if worker.calls is None:
            worker.calls = calls = MethodCalls(worker, self, self._tensors)
            calls.start(lambda: _settings_of(worker))

    @property
    def _member(self) -> model_dispatch.Member:
        return self._replica if self._worker is None else self._worker

    @property
    def rank(self) -> int:
        """Number of this worker; 0 is the chief."""
        return 0 if self._worker is None else self._worker.number

    @property
    def is_chief(self) -> bool:
        return self._worker is not None and self._worker.is_chief

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of workers that contribute to one update: 1 in asynchronous training."""
        return self._worker.workers if self._worker is not None and self._worker.rules.synchronous else 1

    @property
    def global_step(self) -> int:
        """Number of the job's updates at the time this worker's last one was applied.

        It is not contiguous: other workers make updates in between.
        """
        return 0 if self._worker is None else self._worker.global_step

    @property
    def _in_function(self) -> bool:
        """Whether this is a worker of a `ClusterCoordinator`, which runs each function on its own."""
        return self._worker is not None and self._worker.in_function

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent to the servers."""
        return 0 if self._worker is None else self._worker.client.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes that the servers have sent to this worker."""
        return 0 if self._worker is None else self._worker.client.bytes_received

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        if self._in_function:
            return super().run(fn, args, kwargs, options)
        raise UnsupportedError(
            "With ParameterServerStrategy strategy.run() is for functions that a ClusterCoordinator has scheduled. Use "
            "fit(), or MultiWorkerMirroredStrategy for another custom training loop."
        )

    def reduce(self, reduce_op: Any, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        if self._in_function:
            return super().reduce(reduce_op, value, axis)
        raise UnsupportedError("Workers among parameter servers do not wait for each other, so they cannot reduce().")

    def gather(self, value: Any, axis: int) -> Any:
        if self._in_function:
            return super().gather(value, axis)
        raise UnsupportedError("Workers among parameter servers do not wait for each other, so they cannot gather().")

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> DistributedDataset:
        worker = self._worker
        if worker is None:
            return super().distribute_datasets_from_function(dataset_fn, options)
        if self._in_function:  # the chief, number 0, runs no functions
            context = InputContext(worker.workers - 1, worker.number - 1, 1)
        else:
            context = InputContext(worker.workers, worker.number, 1)
        return super().distribute_datasets_from_function(lambda _: dataset_fn(context), options)

    def explain_sharding(self, dataset: Any, *, batch_size: int | None = None) -> str:
        """Explain which part of an input of `fit` the workers read: batches are assigned during training."""
        workers = 1 if self._worker is None else self._worker.workers
        return f"Each of the {workers} workers takes whole batches of the input, as the first server hands them out."

    def _distribution(self) -> DatasetDistribution:
        # Every worker has the whole dataset; the head server assigns it the batches to train on.
        return replace(super()._distribution(), rank=0, world_size=1)


def serve(
    identity: TaskIdentity, snapshot_dir: str | os.PathLike[str] | None, snapshot_s: float, replication: int
) -> None:
    """Run a parameter server until the job is over."""
    process_exit.install()
    if not snapshot_s > 0:
        raise ConfigurationError(f"snapshot_seconds is {snapshot_s}; it must be a time greater than 0.")
    _check_replication(identity, replication)
    prepare()
    is_replicated = replication > 1
    # A replica is newer than any snapshot, so snapshots would only cost time.
    snapshots = None if is_replicated else snapshots_of(identity, None if snapshot_dir is None else Path(snapshot_dir))
    server = ParameterServer(identity, snapshots, snapshot_s, is_replicated=is_replicated)
    telemetry.current.read_server = lambda: server.figures
    telemetry.start_publishing()
    progress.report("serves")
    server.run()


def _cast(compression: Compression | str | None) -> Float16 | BFloat16 | None:
    resolved = resolve_compression(compression)
    if resolved is None or (isinstance(resolved, Float16 | BFloat16) and not resolved.feedback):
        return resolved
    raise ConfigurationError(
        f"compression is {compression!r}; gradients go to parameter servers in their own dtype or as 'float16' or "
        f"'bfloat16', without feedback. The others are for MultiWorkerMirroredStrategy and MirroredStrategy."
    )


def _check_replication(identity: TaskIdentity, replication: int) -> None:
    servers = sum(task.type == PS for task in identity.spec.tasks)
    if replication not in (1, 2):
        raise ConfigurationError(f"replication is {replication}; pass 2 for a replica of each shard, or 1 for none.")
    if replication > servers:
        raise ConfigurationError(
            "replication=2 needs a second parameter server for the replicas, and the cluster has one: start the job "
            "with `phalanx run --ps 2`."
        )


def _settings_of(worker: ParameterServerWorker) -> WorkerSettings:
    reconnection = worker.client.reconnection
    return WorkerSettings(
        worker.rules,
        worker.partitioner,
        worker.compression,
        worker.embedding_rows,
        reconnection.return_timeout_s,
        worker.client.is_replicated,
        [*sys.path],
    )


RANDOM_STATE = "random state"

_joined_worker: tuple[ClusterSpec, ParameterServerWorker] | None = None
"""The cluster and worker of this process: a task has one port, so it joins one cluster, once."""


def join_as_worker(
    identity: TaskIdentity,
    rules: UpdateRules,
    partitioner: Partitioner | None,
    compression: Float16 | BFloat16 | None,
    embedding_rows: bool | str,
    return_timeout_s: float,
    *,
    is_replicated: bool,
) -> ParameterServerWorker:
    """Return the worker of this process, created on the first call; later strategies change its rules."""
    global _joined_worker
    if _joined_worker is None:
        process_exit.install()
        prepare()
        worker = ParameterServerWorker(
            client=ParameterServerClient(identity, return_timeout_s, is_replicated=is_replicated),
            number=identity.rank,
            workers=len(identity.tasks),
            rules=rules,
            partitioner=partitioner,
            compression=compression,
            embedding_rows=embedding_rows,
            seed=f"{identity.config.seed} {identity.config.job_id}",
        )
        _joined_worker = (identity.spec, worker)
        telemetry.current.read_gpu = gpu_figures.read
        telemetry.start_publishing(lambda: worker.traffic)
        if identity.config.timeline is not None and identity.rank >= 0:
            timeline_relay.start_worker_recording(identity, identity.config.timeline.path)
        process_exit.at_exit(lambda: worker.client.close(process_exit.failure()))
        _share_random_state(worker)
        return worker
    spec, worker = _joined_worker
    if spec != identity.spec:
        raise ConfigurationError(
            f"This process belongs to the cluster {spec} already, and a new strategy needs {identity.spec}. A process "
            f"belongs to one cluster."
        )
    worker.rules, worker.partitioner, worker.compression = rules, partitioner, compression
    worker.client.reconnection.return_timeout_s = return_timeout_s
    worker.embedding_rows = embedding_rows
    return worker


def _share_random_state(worker: ParameterServerWorker) -> None:
    """Set the chief's random state on all workers, so that unseeded splits and data are equal."""
    if worker.workers == 1:
        return
    if worker.is_chief:
        state: memoryview | None = worker.broadcast_once(RANDOM_STATE, np.frombuffer(encode_random_state(), np.uint8))
    else:
        try:
            received = worker.receive_broadcast(RANDOM_STATE)
        except CollectiveTimeoutError:  # the head server was restarted after the chief's broadcast
            logger.warning("The chief's random state is no longer known: random data and splits may differ.")
            return
        state = received[0] if received else None
    if state is not None:
        restore_random_state(bytes(state))


def identify_task(resolver: ClusterResolver) -> TaskIdentity:
    spec, task = resolver.cluster_spec(), resolver.task()
    if not spec or not any(known.type == PS for known in spec.tasks):
        raise ConfigurationError(
            f"The cluster has no parameter server ({spec.as_dict() or 'there is no cluster'}). Add a task of type 'ps' "
            f"to TF_CONFIG, or start the program with `phalanx run --ps 1 --workers 2`."
        )
    if task is None:
        raise ConfigurationError("Nothing says which task of the cluster this process is. Give `task` in TF_CONFIG.")
    spec.check_member(task)
    facts = JobFacts(
        keras=keras.__version__,
        backend=keras.backend.backend(),
        backend_policy=MIXED_BACKENDS,
        extra={"floatx": keras.config.floatx()},
    )
    return TaskIdentity(spec, task, facts, JobConfig.from_environment())


def _rules(
    identity: TaskIdentity,
    synchronous: bool,
    replicas_to_aggregate: int | None,
    staleness: int | None,
    overlap: bool,
    refuse_nan: bool,
) -> UpdateRules:
    workers = len(identity.tasks)
    if replicas_to_aggregate is not None:
        if not synchronous:
            raise ConfigurationError(
                "replicas_to_aggregate is for synchronous training: pass synchronous=True as well."
            )
        if not 1 <= replicas_to_aggregate <= workers:
            raise ConfigurationError(
                f"replicas_to_aggregate is {replicas_to_aggregate}; it must be from 1 to {workers}, the number of "
                f"workers."
            )
    if staleness is not None and (synchronous or staleness < 0):
        raise ConfigurationError(
            f"staleness={staleness} is no number of steps of 0 or more, or synchronous=True was passed as well, where "
            f"no worker can be ahead of another."
        )
    if overlap and synchronous:
        raise ConfigurationError(
            "overlap=True is for asynchronous training: a synchronous step waits for the gradients of all workers. "
            "Leave out overlap or synchronous."
        )
    return UpdateRules(
        synchronous=synchronous,
        replicas_to_aggregate=0
        if replicas_to_aggregate is None or replicas_to_aggregate == workers
        else replicas_to_aggregate,
        staleness=-1 if staleness is None else staleness,
        refuse_nan=refuse_nan,
        timeout_s=identity.config.timeout_s,
        overlap=overlap,
    )
