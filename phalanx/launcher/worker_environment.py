"""Builds the environment variables of a worker. Pure functions."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence

from phalanx.config.environment_variables import (
    CPU_DEVICES,
    DASHBOARD_TOKEN,
    DEVICES_PER_WORKER,
    ELASTIC_COORDINATOR,
    HOROVOD_CROSS_RANK,
    HOROVOD_CROSS_SIZE,
    HOROVOD_LOCAL_RANK,
    HOROVOD_LOCAL_SIZE,
    HOROVOD_RANK,
    HOROVOD_SIZE,
    HOST_GPUS,
    HOST_ID,
    JAX_THREADS,
    JOB_ID,
    KERAS_BACKEND,
    LOCAL_REPLICAS,
    PREEMPTION_SIGNAL,
    RENDEZVOUS_TIMEOUT,
    REPLICA_CLUSTER,
    RETURN_TIMEOUT,
    RUN,
    SECRET,
    SNAPSHOTS,
    TF_CONFIG,
    TLS_FILES,
)
from phalanx.config.launch_config import LaunchConfig
from phalanx.config.task_names import trains
from phalanx.monitoring.startup_noise import QUIET

_OF_A_TASK = (DEVICES_PER_WORKER, ELASTIC_COORDINATOR, HOST_GPUS, LOCAL_REPLICAS, REPLICA_CLUSTER, RUN, SNAPSHOTS)
"""Variables that another job may have set for its task, which starts this job."""

# Variables of the launcher's environment that are forwarded to other hosts. Those that describe the launcher's host,
# such as CUDA_VISIBLE_DEVICES, are left out on purpose.
FORWARDED_PREFIXES = ("PHALANX_", "HOROVOD_", "KERAS_", "JAX_", "XLA_", "TF_", "TORCH_", "OMP_", "MKL_", "OPENBLAS_")
FORWARDED = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "LANG", "LC_ALL", "NO_COLOR")


def tf_config(tasks: Sequence[str], addresses: Sequence[str], number: int) -> str:
    """`TF_CONFIG` in TensorFlow's format for task number `number`. Tasks are written `worker/1`."""
    cluster: dict[str, list[str]] = {}
    for task, address in zip(tasks, addresses, strict=True):
        cluster.setdefault(task.partition("/")[0], []).append(address)
    kind, _, index = tasks[number].partition("/")
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": int(index)}})


def horovod_settings(addresses: Sequence[str], rank: int) -> dict[str, str]:
    """The variables that `horovodrun` sets for a process; many programs read them before `hvd.init()`.

    Source: names and meanings are those of Horovod's Gloo launcher.
    """
    hosts = [address.rpartition(":")[0] for address in addresses]
    sizes: Counter[str] = Counter()
    local_ranks = []
    for host in hosts:
        local_ranks.append(sizes[host])
        sizes[host] += 1
    peers = [each for each, local_rank in enumerate(local_ranks) if local_rank == local_ranks[rank]]
    numbers = {
        HOROVOD_RANK: rank,
        HOROVOD_SIZE: len(hosts),
        HOROVOD_LOCAL_RANK: local_ranks[rank],
        HOROVOD_LOCAL_SIZE: sizes[hosts[rank]],
        HOROVOD_CROSS_RANK: peers.index(rank),
        HOROVOD_CROSS_SIZE: len(peers),
    }
    return {name: str(number) for name, number in numbers.items()}


def thread_settings(threads: int) -> dict[str, str]:
    """The variables from which backends and their libraries size their thread pools.

    JAX already sizes its pool by the affinity; PJRT_NPROC covers containers with a smaller quota. TensorFlow gets a
    second inter-op thread even on one core: a collective blocks the thread that it runs on, and input pipelines share
    that pool.
    """
    n = str(threads)
    return {
        "OMP_NUM_THREADS": n,
        "MKL_NUM_THREADS": n,
        "OPENBLAS_NUM_THREADS": n,
        JAX_THREADS: n,
        "TF_NUM_INTRAOP_THREADS": n,
        "TF_NUM_INTEROP_THREADS": str(max(2, threads)),
    }


def job_settings(
    tasks: Sequence[str],
    addresses: Sequence[str],
    rank: int,
    identity: tuple[str, str],
    config: LaunchConfig,
    *,
    return_timeout_s: float | None = None,
    coordinator: str | None = None,
    run: str | None = None,
) -> dict[str, str]:
    """The variables that make a process task number `rank` of this job. They override the user's environment.

    Args:
        tasks, addresses: Names and addresses of all tasks, by rank.
        identity: The secret and the id of the job.
        config: Backend, start timeout and preemption signal.
        return_timeout_s: Seconds that tasks wait for a restarted task; None: the default.
        coordinator: Address of the elastic coordinator; None for a job of fixed size.
        run: See `WorkerTemplate`.
    """
    secret, job_id = identity
    settings = {
        TF_CONFIG: tf_config(tasks, addresses, rank),
        SECRET: secret,
        JOB_ID: job_id,
        KERAS_BACKEND: config.backend,
        RENDEZVOUS_TIMEOUT: None if config.start_timeout_s is None else f"{config.start_timeout_s:g}",
        RETURN_TIMEOUT: None if return_timeout_s is None else f"{return_timeout_s:g}",
        ELASTIC_COORDINATOR: coordinator,
        RUN: run,
        PREEMPTION_SIGNAL: config.preemption_signal,
    }
    # Ranks of elastic jobs change, and servers have none.
    if coordinator is None and all(map(trains, tasks)):
        settings.update(horovod_settings(addresses, rank))
    return {name: value for name, value in settings.items() if value is not None}


def worker_environment(
    base: Mapping[str, str], job: Mapping[str, str], threads: int, directory: str | None = None
) -> dict[str, str]:
    """The complete environment of a worker: defaults, overridden by the user's variables, overridden by the job's.

    Args:
        directory: Working directory of the worker; None: that of this process.
    """
    # Unbuffered, or a worker's last lines before a crash would be lost in its buffer. One hash seed, or each process
    # would order sets of strings differently: classes, vocabularies, files.
    defaults = {**thread_settings(threads), **QUIET, "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}
    # With DEVICES_PER_WORKER, the number of CPU devices is also that of the outer task.
    outer = {*_OF_A_TASK, CPU_DEVICES} if DEVICES_PER_WORKER in base else _OF_A_TASK
    own = {name: value for name, value in base.items() if name not in outer}
    environment = {**defaults, **own, **job}
    # Absolute, since the program may change its directory before it joins the job.
    files = {name: environment[name] for name in TLS_FILES if environment.get(name)}
    return environment | {name: os.path.abspath(os.path.join(directory or "", path)) for name, path in files.items()}


def forwarded(base: Mapping[str, str]) -> dict[str, str]:
    """The part of the launcher's environment that is forwarded to workers on other hosts."""
    return {
        name: value
        for name, value in base.items()
        if (name.startswith(FORWARDED_PREFIXES) or name in FORWARDED)
        and name not in (DASHBOARD_TOKEN, HOST_ID, SECRET, *_OF_A_TASK)
    }
