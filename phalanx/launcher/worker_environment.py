"""The environment variables with which a worker starts. Plain functions from values to values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence

from phalanx.config.job_config import (
    HOST_ID,
    JOB_ID,
    KEEPER,
    PREEMPTION_SIGNAL,
    RENDEZVOUS_TIMEOUT,
    RETURN_TIMEOUT,
    SECRET,
    SNAPSHOTS,
    TLS_FILES,
)
from phalanx.devices.gpu_count import HOST_GPUS
from phalanx.errors import ConfigurationError

_OF_A_TASK = (HOST_GPUS, KEEPER, SNAPSHOTS)
"""What another job has told a task of its own, which starts this one."""

CHILD = "PHALANX_CHILD"
PROGRESS_FILE = "PHALANX_PROGRESS_FILE"
GRACE = "PHALANX_GRACE"
EVALUATOR_GRACE = "PHALANX_EVALUATOR_GRACE"
# One evaluation of the last checkpoint; as long as anything else in a job may take (PHALANX_TIMEOUT).
DEFAULT_EVALUATOR_GRACE_S = 600.0
PREEMPTION_GRACE = "PHALANX_PREEMPTION_GRACE"
# What the cloud providers' spot machines and Kubernetes give before they switch off.
DEFAULT_PREEMPTION_GRACE_S = 30.0
DISCOVERY_SECONDS = "PHALANX_DISCOVERY_SECONDS"
# Between two questions to a host discovery script. Horovod asks every second; hosts take longer to come up than two.
DEFAULT_DISCOVERY_S = 2.0
DISCOVERY_TIMEOUT = "PHALANX_DISCOVERY_TIMEOUT"
# Such a script asks a scheduler or a cloud, which may be slow; one that is slower than this hangs.
DEFAULT_DISCOVERY_TIMEOUT_S = 30.0
# Survivors of a failed worker notice at once, and need a moment to raise and print their own PeerLostError.
DEFAULT_GRACE_S = 4.0

# Variables of the launcher's environment that go along to other hosts. What describes the launcher's own
# host, such as CUDA_VISIBLE_DEVICES, is left out on purpose.
FORWARDED_PREFIXES = ("PHALANX_", "HOROVOD_", "KERAS_", "JAX_", "XLA_", "TF_", "TORCH_", "OMP_", "MKL_", "OPENBLAS_")
FORWARDED = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "LANG", "LC_ALL", "NO_COLOR")


def tf_config(tasks: Sequence[str], addresses: Sequence[str], number: int) -> str:
    """`TF_CONFIG` as TensorFlow has it, for the task of this number; tasks are written `worker/1`."""
    cluster: dict[str, list[str]] = {}
    for task, address in zip(tasks, addresses, strict=True):
        cluster.setdefault(task.partition("/")[0], []).append(address)
    kind, _, index = tasks[number].partition("/")
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": int(index)}})


def thread_settings(threads: int) -> dict[str, str]:
    """What the backends and their libraries read to size their thread pools.

    JAX sizes its pool by the affinity already; PJRT_NPROC covers containers whose quota is below it.
    TensorFlow gets a second inter-op thread even on one core: a collective blocks the one it runs on, and
    input pipelines share that pool.
    """
    n = str(threads)
    return {
        "OMP_NUM_THREADS": n,
        "MKL_NUM_THREADS": n,
        "OPENBLAS_NUM_THREADS": n,
        "PJRT_NPROC": n,
        "TF_NUM_INTRAOP_THREADS": n,
        "TF_NUM_INTEROP_THREADS": str(max(2, threads)),
    }


def job_settings(
    *,
    tasks: Sequence[str],
    addresses: Sequence[str],
    rank: int,
    secret: str,
    job_id: str,
    backend: str | None = None,
    start_timeout_s: float | None = None,
    return_timeout_s: float | None = None,
    keeper: str | None = None,
    preemption_signal: str | None = None,
) -> dict[str, str]:
    """What makes a process task number `rank` of this job. It replaces what the user's environment says."""
    settings = {
        "TF_CONFIG": tf_config(tasks, addresses, rank),
        SECRET: secret,
        JOB_ID: job_id,
    }
    if backend is not None:
        settings["KERAS_BACKEND"] = backend
    if start_timeout_s is not None:
        settings[RENDEZVOUS_TIMEOUT] = f"{start_timeout_s:g}"
    if return_timeout_s is not None:
        settings[RETURN_TIMEOUT] = f"{return_timeout_s:g}"
    if keeper is not None:
        settings[KEEPER] = keeper
    if preemption_signal is not None:
        settings[PREEMPTION_SIGNAL] = preemption_signal
    return settings


def worker_environment(
    base: Mapping[str, str], job: Mapping[str, str], threads: int, folder: str | None = None
) -> dict[str, str]:
    """The whole environment of a worker: thread settings, then the user's own, then the job's.

    Args:
        folder: where it starts; None: where this process is.
    """
    # Unbuffered, or a worker's last lines before a crash would be lost in its buffer.
    defaults = {**thread_settings(threads), "PYTHONUNBUFFERED": "1"}
    own = {name: value for name, value in base.items() if name not in _OF_A_TASK}
    environment = {**defaults, **own, **job}
    # The program may go to another folder before it joins the job.
    files = {name: environment[name] for name in TLS_FILES if environment.get(name)}
    return environment | {name: os.path.abspath(os.path.join(folder or "", path)) for name, path in files.items()}


def grace_s(environ: Mapping[str, str]) -> float:
    """Seconds that the survivors of a failed worker get to end by themselves (PHALANX_GRACE)."""
    return _seconds(environ, GRACE, DEFAULT_GRACE_S)


def evaluator_grace_s(environ: Mapping[str, str]) -> float:
    """Seconds that the evaluator gets after the training has ended (PHALANX_EVALUATOR_GRACE)."""
    return _seconds(environ, EVALUATOR_GRACE, DEFAULT_EVALUATOR_GRACE_S)


def preemption_grace_s(environ: Mapping[str, str]) -> float:
    """Seconds that a job that was told to end gets for its checkpoint (PHALANX_PREEMPTION_GRACE)."""
    return _seconds(environ, PREEMPTION_GRACE, DEFAULT_PREEMPTION_GRACE_S)


def discovery_s(environ: Mapping[str, str]) -> tuple[float, float]:
    """Seconds between two questions to a host discovery script (PHALANX_DISCOVERY_SECONDS), and that it may take
    (PHALANX_DISCOVERY_TIMEOUT)."""
    return (
        _seconds(environ, DISCOVERY_SECONDS, DEFAULT_DISCOVERY_S),
        _seconds(environ, DISCOVERY_TIMEOUT, DEFAULT_DISCOVERY_TIMEOUT_S),
    )


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(
            f"{name}={text!r} is no time. Write a number of seconds, for example {name}={default:g}."
        )
    return seconds


def forwarded(base: Mapping[str, str]) -> dict[str, str]:
    """The part of the launcher's environment that workers on other hosts get too."""
    return {
        name: value
        for name, value in base.items()
        if (name.startswith(FORWARDED_PREFIXES) or name in FORWARDED) and name not in (HOST_ID, SECRET)
    }
