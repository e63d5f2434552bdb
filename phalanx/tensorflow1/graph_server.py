"""TensorFlow's server of one task, on the cluster that Phalanx finds."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import tensorflow as tf

from phalanx.cluster.resolvers.auto_resolver import resolve
from phalanx.config.job_config import JobConfig
from phalanx.errors import ConfigurationError
from phalanx.runtime import process_exit
from phalanx.tensorflow1.task_probe import ProbeResult, TrainingEndDetector, probe
from phalanx.transport.address import Address
from phalanx.transport.ports import describe_failure, listen_at

logger = logging.getLogger(__name__)

v1 = tf.compat.v1

PS = "ps/"
JOIN_POLL_S = 1.0
REPORT_MS = 10_000
"""Timeout of a report. A live server takes a message within milliseconds; on a busy host, within seconds."""
MAX_TASKS = 10_000
"""Capacity of the queue, which holds the name of each task; TensorFlow's jobs have hundreds."""

_servers: weakref.WeakValueDictionary[str, Server] = weakref.WeakValueDictionary()
"""The servers of this process by target."""


class Server(tf.compat.v1.train.Server):  # type: ignore[misc]
    """`tf.train.Server` of TensorFlow 1: holds variables and computes for the sessions of all tasks.

    Without a cluster argument, it is the task that `phalanx run`, TF_CONFIG or a scheduler assigned to this process.

    TensorFlow's servers have no authentication or encryption and listen on all interfaces. Anyone who can reach the
    port can run code in this process: use them only in trusted networks.

    Args:
        server_or_cluster_def: The cluster, as in TensorFlow; None to find it and this task.
        job_name: Type of this task.
        task_index: Index of this task within the type.
        protocol: See TensorFlow.
        config: See TensorFlow.
        start: See TensorFlow.

    Raises: ConfigurationError if the cluster or the task is unknown, or the port of the task is taken.
    """

    def __init__(
        self,
        server_or_cluster_def: Any = None,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ):
        process_exit.install()
        if server_or_cluster_def is None:
            server_or_cluster_def, job_name, task_index = _resolve_task(job_name, task_index)
        elif not isinstance(server_or_cluster_def, v1.train.ServerDef | v1.train.ClusterDef):
            server_or_cluster_def = tf.train.ClusterSpec(server_or_cluster_def)
        _free_inherited_port(JobConfig.from_environment().listen_fd)
        try:
            super().__init__(server_or_cluster_def, job_name, task_index, protocol, config, start)
        except tf.errors.UnknownError:  # without the reason
            self._check_port()
            raise
        _servers[self.target] = self  # the target has the port, which TensorFlow may have chosen
        if start and self.task in _training_tasks({self.task: None}):
            process_exit.at_exit(functools.partial(_report_end, self.target, self.task, self.other_tasks))
        own = Address.parse(self.target.removeprefix("grpc://"), where="the server's target")
        logger.log(
            logging.INFO if own.is_loopback else logging.WARNING,
            "The TensorFlow server of %s at %s lets in anyone who can reach its port, and encrypts nothing.",
            self.task,
            own,
        )

    @property
    def task(self) -> str:
        """Name of this task, such as `worker/0`."""
        return f"{self.server_def.job_name}/{self.server_def.task_index}"

    @property
    def other_tasks(self) -> dict[str, Address]:
        """The addresses of the other tasks of the cluster."""
        texts = self._address_texts()
        return {task: Address.parse(text, where=task) for task, text in texts.items() if task != self.task}

    def _address_texts(self) -> dict[str, str]:
        """Return the addresses of all tasks; a local server may have port 0, which is not a real port."""
        jobs = self.server_def.cluster.job
        return {f"{job.name}/{index}": text for job in jobs for index, text in sorted(job.tasks.items())}

    def _check_port(self) -> None:
        """Raise ConfigurationError if no server can listen on the port of this task."""
        text = self._address_texts()[self.task]
        if text.endswith(":0"):  # TensorFlow chooses the port
            return
        own = Address.parse(text, where=self.task)
        try:
            listen_at(None, own.port).close()  # on all addresses, as TensorFlow does
        except OSError as error:
            raise describe_failure(own, error) from error

    def join(self) -> NoReturn:
        """Serve until the training tasks are gone, then exit the process with code 0.

        TensorFlow's `join` does not return either: programs expect only workers to run the code after it.

        Raises: RendezvousError if no training task has appeared within PHALANX_RENDEZVOUS_TIMEOUT seconds.
        """
        training = _training_tasks(self.other_tasks)
        if not training:
            raise ConfigurationError(
                f"join() of {self.task} waits for the tasks that train, and the cluster has none. Add the workers, or "
                f"use the server without join()."
            )
        config = JobConfig.from_environment()
        end = TrainingEndDetector(training, config.rendezvous_timeout_s, config.timeout_s, time.monotonic())
        finished: set[str] = set()
        # A task that has reported its end is no longer probed. A task that is only gone may restart.
        with FinishedTaskQueue(self) as reports:
            while True:
                finished |= reports.read()
                answers = {task: probe(address) for task, address in training.items() if task not in finished}
                if end.is_over(answers, finished, time.monotonic()):
                    break
                time.sleep(JOIN_POLL_S)
        logger.info("%s: the job is over.", self.task)
        sys.exit(0)

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """Create the server of a cluster with one task, on a free port of this host."""
        return Server({"localhost": ["localhost:0"]}, protocol="grpc", config=config, start=start)


class FinishedTaskQueue:
    """On a parameter server: the tasks that have finished, from a queue on this server. A context manager."""

    def __init__(self, server: Server):
        with tf.Graph().as_default() as graph:
            queue = _finished_queue(server.task)
            self._size, self._next = queue.size(), queue.dequeue()
        self._session = v1.Session(server.target, graph=graph, config=_session_config_for(server.task))

    def __enter__(self) -> FinishedTaskQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def read(self) -> set[str]:
        """Return the tasks that have finished since the last call."""
        # Exactly as many as the queue holds, since `dequeue` waits for more. Only this server reads its queue.
        return {self._session.run(self._next).decode() for _ in range(self._session.run(self._size))}


def _report_end(target: str, task: str, others: Mapping[str, Address]) -> None:
    """Report to all parameter servers that this task has finished, unless it failed: then it may restart."""
    if process_exit.failure():
        return
    # Probe first: a server that is gone would block the session.
    servers = [
        other for other, address in others.items() if other.startswith(PS) and probe(address) is ProbeResult.SERVES
    ]
    for server in servers:
        with tf.Graph().as_default() as graph, contextlib.suppress(tf.errors.OpError):  # it may be gone already
            report = _finished_queue(server).enqueue(task)
            with v1.Session(target, graph=graph, config=_session_config_for(task, server)) as session:
                session.run(report, options=v1.RunOptions(timeout_in_ms=REPORT_MS))


def _finished_queue(task: str) -> Any:
    """Create, in the current graph, the queue in which a server receives the names of finished tasks."""
    with tf.device(device_of(task) + "/device:CPU:0"):
        return tf.queue.FIFOQueue(MAX_TASKS, tf.string, [[]], shared_name="phalanx_finished_tasks")


def _session_config_for(*tasks: str) -> Any:
    """Return the configuration of a session that needs only these tasks."""
    return v1.ConfigProto(device_filters=list(map(device_of, tasks)), operation_timeout_in_ms=REPORT_MS)


def device_of(task: str) -> str:
    """Return TensorFlow's device name of a task."""
    job, _, index = task.partition("/")
    return f"/job:{job}/task:{index}"


def _training_tasks(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tasks that train."""
    return {task: value for task, value in tasks.items() if not task.startswith((PS, "evaluator/"))}


def server_of(target: Any) -> Server | None:
    """Return the server of this process with this session target; None if there is none."""
    return _servers.get(target)


def _resolve_task(job_name: str | None, task_index: int | None) -> tuple[Any, str, int]:
    """Return the cluster and the task with which this process was started."""
    resolver = resolve()
    spec, task = resolver.cluster_spec(), resolver.task()
    if not spec or task is None:
        raise ConfigurationError(
            "Server() found no cluster: start the program with `phalanx run --ps 1 --workers 2`, set TF_CONFIG, or "
            "pass the cluster, job_name and task_index."
        )
    return (
        tf.train.ClusterSpec(spec.as_dict()),
        task.type if job_name is None else job_name,
        task.index if task_index is None else task_index,
    )


def _free_inherited_port(descriptor: int | None) -> None:
    """Free the port that the launcher keeps open for this task, so that TensorFlow can listen on it.

    TensorFlow cannot take over a socket. The launcher's socket and TensorFlow's both have SO_REUSEADDR. So after the
    launcher's socket stops listening, it still reserves the port, but does not prevent TensorFlow from listening.
    """
    if descriptor is None:
        return
    with socket.socket(fileno=os.dup(descriptor)) as inherited:
        try:
            inherited.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # an earlier server of this task has already stopped it from listening
                raise
