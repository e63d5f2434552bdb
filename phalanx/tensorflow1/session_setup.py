"""Prepares a session on a server, and interprets its errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from phalanx.config.environment_variables import (
    DEFAULT_RETURN_TIMEOUT_S,
    RENDEZVOUS_TIMEOUT,
    RETURN_TIMEOUT,
)
from phalanx.config.job_config import JobConfig
from phalanx.errors import PeerLostError, RendezvousError
from phalanx.tensorflow1.graph_server import PS, Server, device_of, server_of
from phalanx.tensorflow1.task_probe import ProbeResult, probe, wait_for_tasks
from phalanx.transport.address import Address

v1 = tf.compat.v1
LOSSES = (tf.errors.AbortedError, tf.errors.UnavailableError)
"""Errors that TensorFlow raises when it cannot reach a task, or when a task has restarted."""

_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")
"""A task's name in TensorFlow's errors."""

_started: set[str] = set()
"""Targets that already had a session: a task that does not answer there is lost, not late."""


def await_tasks(master: Any, config: Any) -> None:
    """Wait for the tasks that a session needs.

    Args:
        master: Target of the session. If it is not a server of this process, this does not wait.
        config: Configuration of the session, from `add_device_filters`.

    Raises: RendezvousError or PeerLostError that names the tasks that do not answer in time.
    """
    server = server_of(master)
    if server is None:
        return
    needed = _tasks_of(server, config.device_filters)
    job = JobConfig.from_environment()
    if server.target in _started:
        bound_s = DEFAULT_RETURN_TIMEOUT_S if job.return_timeout_s is None else job.return_timeout_s
        wait_for_tasks(needed, bound_s, lambda missing: _lost_error(missing, bound_s))
    else:
        bound_s = job.rendezvous_timeout_s
        wait_for_tasks(needed, bound_s, lambda missing: _late_error(missing, bound_s))
        _started.add(server.target)  # only now: until all have answered once, a missing task is late


def add_device_filters(master: Any, config: Any, graph: Any) -> Any:
    """Return the configuration of a session that needs only the tasks on which operations of its graph are placed.

    If no operation is placed yet, the session needs all parameter servers. Without `device_filters`, TensorFlow waits
    without limit for all tasks of the cluster, even for workers that have finished.

    Args:
        master: Target of the session.
        config: A `ConfigProto` or None; if it has `device_filters`, it is not changed.
        graph: The graph.
    """
    server = server_of(master)
    if server is None:
        return config
    copy = v1.ConfigProto()
    if config is not None:
        copy.CopyFrom(config)
    if not copy.device_filters:
        # This task is always needed: its server is the session's master.
        filters = {device_of(server.task)}
        specs = [tf.DeviceSpec.from_string(device) for device in {each.device for each in graph.get_operations()}]
        jobs = [each for each in specs if each.job is not None]
        placed = {f"/job:{each.job}" + ("" if each.task is None else f"/task:{each.task}") for each in jobs}
        # A graph without placements is built after its session: on the servers, as most graphs are.
        filters |= placed or {device_of(task) for task in server.other_tasks if task.startswith(PS)}
        copy.device_filters.extend(sorted(filters))
    return copy


@contextlib.contextmanager
def translate_lost_task_errors(master: Any) -> Iterator[None]:
    """Within the context, convert TensorFlow's errors about a lost task to a PeerLostError that names it."""
    try:
        yield
    except LOSSES as error:
        server = server_of(master)
        servers = {} if server is None else {t: a for t, a in server.other_tasks.items() if t.startswith(PS)}
        named = {f"{job}/{index}" for job, index in _TASK.findall(str(error))}
        for task, address in servers.items():
            # A task that the error names may have restarted meanwhile.
            if task in named or probe(address) is not ProbeResult.SERVES:
                raise PeerLostError(
                    f"{task} at {address} was lost, with the variables on it. With MonitoredTrainingSession, training "
                    f"continues from the last checkpoint when it is back.",
                    rank=-1,
                    task=task,
                    host=address.host,
                ) from error
        raise


def _lost_error(missing: str, bound_s: float) -> PeerLostError:
    task, _, place = missing.partition(" at ")
    return PeerLostError(
        f"Lost for more than {bound_s:g} s ({RETURN_TIMEOUT}): {missing}.",
        rank=-1,
        task=task,
        host=place.partition(":")[0],
    )


def _late_error(missing: str, bound_s: float) -> RendezvousError:
    return RendezvousError(
        f"The TensorFlow servers of the job did not start within {bound_s:g} s ({RENDEZVOUS_TIMEOUT}): {missing}. Are "
        f"these tasks started, with the same cluster?"
    )


def _tasks_of(server: Server, filters: Any) -> dict[str, Address]:
    """Return the addresses of the tasks, except this one, that pass any of the filters."""
    specs = [tf.DeviceSpec.from_string(each) for each in filters]

    def passes(task: str) -> bool:
        job, _, index = task.partition("/")
        return any(spec.job in (None, job) and spec.task in (None, int(index)) for spec in specs)

    return {task: address for task, address in server.other_tasks.items() if passes(task)}
