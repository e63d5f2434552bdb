"""`Server`: a task that serves the chief's program instead of running it (`tf.distribute.Server`)."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.spec import CHIEF, PS, WORKER, ClusterSpec
from phalanx.config.environment_variables import SECRET
from phalanx.coordinator.cluster_coordinator import coordinator_of_worker
from phalanx.coordinator.worker_server import WorkerServer, WorkerSettings
from phalanx.engines import prepare
from phalanx.errors import ConfigurationError
from phalanx.parameter_server.server.shard_group import SNAPSHOT_INTERVAL_S
from phalanx.runtime import process_exit, progress
from phalanx.strategies.parameter_server_strategy import (
    ParameterServerStrategy,
    identify_task,
    join_as_worker,
    serve,
)
from phalanx.strategies.strategy import install_trainer_hook
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker


class Server:
    """A task `ps` or `worker` that serves the program of the task `chief` (`tf.distribute.Server`).

    A `ps` holds variables and runs the optimizer. A `worker` recreates what the chief's program creates in the scope of
    its `ParameterServerStrategy`, runs the functions that a `ClusterCoordinator` schedules, and takes part in `fit`. If
    it is killed and restarted, it resumes.

    The chief sends code to workers, so the job needs a secret: `phalanx run` creates one; otherwise, set PHALANX_SECRET
    on all tasks.

    Args:
        server_or_cluster_def: The cluster, as a `ClusterSpec` or a dict.
        job_name: "ps" or "worker".
        task_index: Index of this server.
        protocol: Ignored; accepted for compatibility with `tf.distribute.Server`.
        config: Ignored.
        start: Ignored; `join` starts to serve.
        replication: See `ParameterServerStrategy`; only for "ps".
        snapshot_dir: See `ParameterServerStrategy`; only for "ps".
        snapshot_seconds: See `ParameterServerStrategy`; only for "ps".

    Raises: ConfigurationError for another job, and for a worker without a chief or without a secret.

    >>> phalanx.Server({"ps": ["a:2222"], "worker": ["b:2222"]}, job_name="ps", task_index=0).join()  # doctest: +SKIP
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterSpec | dict[str, Any],
        job_name: str = PS,
        task_index: int = 0,
        protocol: Any = None,
        config: Any = None,
        start: bool = True,
        *,
        replication: int = 1,
        snapshot_dir: str | os.PathLike[str] | None = None,
        snapshot_seconds: float = SNAPSHOT_INTERVAL_S,
    ):
        del protocol, config, start
        if job_name not in (PS, WORKER):
            raise ConfigurationError(
                f"A Server of job {job_name!r} has nothing to serve: servers are the tasks 'ps' and 'worker'. The "
                f"process of the chief creates a ParameterServerStrategy."
            )
        spec = ClusterSpec(server_or_cluster_def)
        self._resolver = SimpleClusterResolver(spec, task_type=job_name, task_id=task_index)
        self._identity = identify_task(self._resolver)
        if job_name == WORKER:
            self._check_worker(spec)
        self._server_options = snapshot_dir, snapshot_seconds, replication

    @property
    def target(self) -> str:
        """The address of this task, as TensorFlow writes it."""
        return f"grpc://{self._identity.address}"

    def start(self) -> None:
        """Do nothing: `join` starts to serve."""

    def join(self) -> NoReturn:
        """Serve until the job is over, then exit the process with code 0.

        `tf.distribute.Server.join` does not return either: programs expect only the chief to run past it.
        """
        if self._identity.task.type == PS:
            serve(self._identity, *self._server_options)
        else:
            process_exit.install()
            prepare()
            install_trainer_hook()
            progress.report("waits for the chief")
            WorkerServer(self._identity, self._join_job, coordinator_of_worker).run()
        sys.exit(0)

    def _join_job(self, settings: WorkerSettings) -> tuple[ParameterServerStrategy, ParameterServerWorker]:
        """As a worker: join the job with the chief's settings."""
        worker = join_as_worker(
            self._identity,
            settings.rules,
            settings.partitioner,
            settings.compression,
            settings.embedding_rows,
            settings.return_timeout_s,
            is_replicated=settings.is_replicated,
        )
        return ParameterServerStrategy.for_worker(worker, self._resolver), worker

    def _check_worker(self, spec: ClusterSpec) -> None:
        if not any(task.type == CHIEF for task in spec.tasks):
            raise ConfigurationError(
                f"{self._identity.task} would serve the program of the chief, and the cluster has none: "
                f"{spec.as_dict()}. Add a task 'chief' (`phalanx run --ps 1 --chief --workers 2`), or run the same "
                f"program on all tasks, without Server."
            )
        if not self._identity.config.secret:
            raise ConfigurationError(
                f"The chief sends code to {self._identity.task}, so no one else may be able to: set {SECRET} to the "
                f"same random value for all tasks, or start the job with `phalanx run`, which does so."
            )
