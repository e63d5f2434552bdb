"""Collectives for Python objects.

Objects travel as pickles, and unpickling runs code chosen by the sender. So these functions work only if all ranks have
proved that they have the job's secret (`phalanx run` creates one per job), and over connections that prevent tampering.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from phalanx.config.environment_variables import ENCRYPTION, SECRET
from phalanx.errors import ConfigurationError
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.horovod_job import current_job
from phalanx.horovod.operation_request import OperationKind
from phalanx.horovod.operations import check_name, run
from phalanx.runtime.pickling import dumps


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send a Python object from one rank to all.

    Args:
        obj: The object; ignored on ranks other than the root.
        root_rank: Rank in the job whose object is sent.
        name: Name of the operation; equal on all ranks.
        process_set: The ranks that take part.

    Returns: the object of the root.

    Raises: ConfigurationError in a job without a secret, or whose connections are not encrypted.
    """
    check_pickle_is_safe("broadcast_object")
    is_root = current_job().membership.rank == root_rank
    payload = broadcast_bytes(dumps(obj) if is_root else b"", root_rank, name, process_set)
    return obj if is_root else pickle.loads(payload)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Gather a Python object from each rank.

    Args:
        obj: This rank's object.
        name: Name of the operation; equal on all ranks.
        process_set: The ranks that take part.

    Returns: the objects in rank order.

    Raises: ConfigurationError in a job without a secret, or whose connections are not encrypted.
    """
    check_pickle_is_safe("allgather_object")
    payload, kind = np.frombuffer(dumps(obj), np.uint8), OperationKind.ALLGATHER
    name = check_name("allgather_object", name) or "allgather_object"
    (sizes,) = run(kind, [np.array([payload.size], np.int64)], name=f"{name}.sizes", process_set=process_set)
    (data,) = run(kind, [payload], name=f"{name}.data", process_set=process_set)
    return [pickle.loads(part.tobytes()) for part in np.split(data, np.cumsum(sizes)[:-1])]


def broadcast_bytes(payload: bytes, root_rank: int, name: str | None, process_set: ProcessSet) -> bytes:
    """Return the payload of rank `root_rank`, on every rank."""
    kind = OperationKind.BROADCAST
    root: dict[str, Any] = {"root_rank": root_rank, "process_set": process_set}
    name = check_name("broadcast_object", name) or "broadcast_object"
    (size,) = run(kind, [np.array([len(payload)], np.int64)], name=f"{name}.size", **root)
    is_root = current_job().membership.rank == root_rank
    data = np.frombuffer(payload, np.uint8) if is_root else np.empty(int(size[0]), np.uint8)
    return run(kind, [data], name=f"{name}.data", **root)[0].tobytes()


def check_pickle_is_safe(function: str) -> None:
    """Raise ConfigurationError if processes outside the job could choose what `function` unpickles."""
    job, why = current_job(), f"{function} unpickles what other processes send, which lets them run code here."
    if not job.has_secret:
        raise ConfigurationError(
            f"{why} This job has no secret, so any process could join it. Start it with `phalanx run`, or set {SECRET} "
            f"to the same value for all tasks."
        )
    if not job.is_protected:
        raise ConfigurationError(
            f"{why} {ENCRYPTION} exempts connections of this job from encryption, so anyone on the path could replace "
            f"what is sent. Unset it (the default is `always`), or use TLS."
        )
