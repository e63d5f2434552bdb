"""`CentralStorageStrategy`: local replicas that share one copy of the variables."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace

from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.cluster.spec import PS, RANKED_TYPES, ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import JOB_ID, LOCAL_REPLICAS
from phalanx.config.job_config import JobConfig
from phalanx.devices.gpu_assignment import same_device
from phalanx.devices.replica_devices import devices_of
from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.launcher.local_replicas import JOIN_S, start_local_replicas
from phalanx.parameter_server.client.parameter_client import ParameterServerClient
from phalanx.parameter_server.server.parameter_server import ParameterServer
from phalanx.parameter_server.server_messages import UpdateRules
from phalanx.strategies.current_job import CurrentJob, join_job
from phalanx.strategies.strategy import Strategy
from phalanx.training import model_dispatch
from phalanx.training.servers.central_storage_trainer import CentralStorageWorker
from phalanx.transport.address import LOOPBACK

logger = logging.getLogger(__name__)

STOP_S = 5.0
"""Seconds for the server's threads to end once it is stopped: longer than any update takes."""


class CentralStorageStrategy(Strategy):
    """Synchronous training on several devices of this host, with the variables in one place
    (`tf.distribute.experimental.CentralStorageStrategy`).

    The first process, which the user started, runs the same program again for the other replicas, as
    `MirroredStrategy` does. In addition to its own replica, it stores the trained variables and runs the optimizer;
    `fit` sends it every replica's gradients, and receives new weights. So the optimizer's state is in memory once, and
    is updated once. The numbers are those of `MirroredStrategy`, which is faster if the optimizer's state fits into
    each replica. Outside `fit` (`evaluate`, `predict`, `train_on_batch`, loops with `run`) it works like that strategy.

    Under `phalanx run` on one host, the started workers are the replicas.

    Args:
        compute_devices: number of replicas, or one device for each: ["cpu:0", "cpu:1"], ["/gpu:0", "/gpu:1"]. None:
            one for each GPU, or a single replica if there is no GPU.
        parameter_device: the device that stores the variables: only the first replica's, which is the default.

    Raises: ConfigurationError in a notebook or an interactive session, which cannot be run again; in a job on several
        hosts; in a job that has parameter servers.
    """

    def __init__(self, compute_devices: int | Sequence[str] | None = None, parameter_device: str | None = None):
        self._devices = devices_of(compute_devices, "CentralStorageStrategy", process_environment())
        if parameter_device is not None and not same_device(parameter_device, self._devices[0]):
            raise ConfigurationError(
                f"parameter_device is {parameter_device!r}; the first replica stores the variables, on "
                f"{self._devices[0]}. Leave it out, or name that device first in compute_devices."
            )
        if JOB_ID not in process_environment() or LOCAL_REPLICAS in process_environment():
            start_local_replicas(self._devices)
        resolver = TFConfigClusterResolver()  # as MirroredStrategy
        spec = resolver.cluster_spec()
        if any(task.type == PS for task in spec.tasks):
            raise ConfigurationError(
                "CentralStorageStrategy keeps the variables in its first replica, and this job has parameter servers. "
                "Start it without `--ps`, or use ParameterServerStrategy."
            )
        workers = len(spec.ranked_tasks)
        if compute_devices is not None and workers > 1 and len(self._devices) != workers:
            raise ConfigurationError(
                f"CentralStorageStrategy was given {len(self._devices)} devices, and the job was started with "
                f"{workers} workers. Leave `compute_devices` out, or give `phalanx run --workers` the same number."
            )
        self._job = join_job(resolver, None)
        hosts = self._job.membership.hosts
        if len(hosts) > 1:
            raise ConfigurationError(
                f"CentralStorageStrategy is for one host, and this job runs on {', '.join(hosts)}. Use "
                f"ParameterServerStrategy, or MultiWorkerMirroredStrategy."
            )
        super().__init__(self._job.replica, resolver)
        self._worker = _worker_of(self._job) if self._job.membership.world_size > 1 else None

    @property
    def _member(self) -> model_dispatch.Member:
        return self._replica if self._worker is None else self._worker

    @property
    def local_devices(self) -> tuple[str, ...]:
        return (self._devices[min(self.rank, len(self._devices) - 1)],)


_workers: weakref.WeakKeyDictionary[CurrentJob, CentralStorageWorker] = weakref.WeakKeyDictionary()


def _worker_of(job: CurrentJob) -> CentralStorageWorker:
    """This process as a worker of its job's storage; created once for each job, by all replicas together."""
    if job not in _workers:
        _workers[job] = _join(job)
    return _workers[job]


def _join(job: CurrentJob) -> CentralStorageWorker:
    config = replace(JobConfig.from_environment(), listen_fd=None)  # which the job's own port has taken
    rank, world_size = job.replica.rank, job.replica.world_size
    # It listens before the others learn of the port, so their first attempt to connect succeeds.
    listening = socket.create_server((LOOPBACK, 0)) if rank == 0 else None
    port = job.replica.broadcast_from_chief(listening.getsockname()[1] if listening else None)
    replicas = {kind: tasks for kind, tasks in job.resolver.cluster_spec().as_dict().items() if kind in RANKED_TYPES}
    spec = ClusterSpec({**replicas, PS: [f"{LOOPBACK}:{port}"]})
    if listening is not None:
        storage = _Storage(TaskIdentity(spec, Task(PS, 0), JobFacts(), config), listening)
        storage.start()
        job.before_leaving(storage.close)  # called after `_leave`, which is registered later
    worker = CentralStorageWorker(
        client=ParameterServerClient(TaskIdentity(spec, spec.ranked_tasks[rank], JobFacts(), config)),
        number=rank,
        workers=world_size,
        # As for mirrored replicas: all take part in every step, and values that are not finite are applied.
        rules=UpdateRules(
            synchronous=True,
            replicas_to_aggregate=0,
            staleness=-1,
            refuse_nan=False,
            timeout_s=config.timeout_s,
            all_required=True,
        ),
        partitioner=None,
        compression=None,
        seed=f"{config.seed} {config.job_id}",
        replica=job.replica,
    )
    job.before_leaving(lambda: _leave(worker))
    return worker


def _leave(worker: CentralStorageWorker) -> None:
    if _is_failing():
        worker.client.disconnect()  # the others must count it as lost
    else:
        worker.client.close()


def _is_failing() -> bool:
    """Whether an exception has ended this process's program."""
    return getattr(sys, "last_value", None) is not None


class _Storage:
    """The server in a thread of the first replica."""

    def __init__(self, me: TaskIdentity, listening: socket.socket):
        self._server = ParameterServer(me)
        self._listening = listening
        self._thread = threading.Thread(target=self._run, name="phalanx-central-storage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Wait until all replicas have left; if this process is failing, stop at once."""
        if not _is_failing():
            self._thread.join(JOIN_S)
        self._server.stop()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            self._server.run([self._listening])
        except PhalanxError as error:
            logger.warning("Central storage: %s", error)
