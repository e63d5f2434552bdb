"""Python objects between the ranks of a job.

They travel as pickles, and whoever unpickles runs what the sender wrote. So this works only where all ranks have proved
that they know the job's secret (`phalanx run` makes one for each job).
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from phalanx.config.variables import SECRET
from phalanx.errors import ConfigurationError
from phalanx.horovod import operations
from phalanx.horovod.horovod_job import current
from phalanx.horovod.operation_request import Array
from phalanx.horovod.process_sets import ProcessSet, global_process_set
from phalanx.runtime.pickling import dumps


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of rank `root_rank`, on every rank; what the others pass is ignored.

    Raises: ConfigurationError in a job without a secret.
    """
    check_trust("broadcast_object")
    is_root = current().membership.rank == root_rank
    payload = broadcast_bytes(dumps(obj) if is_root else b"", root_rank, name, process_set)
    return obj if is_root else pickle.loads(payload)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in rank order.

    Raises: ConfigurationError in a job without a secret.
    """
    check_trust("allgather_object")
    payload = np.frombuffer(dumps(obj), np.uint8)
    name = name or "allgather_object"
    sizes = operations.allgather(
        [np.array([payload.size], np.int64)], name=f"{name}.sizes", process_set=process_set, wake=False
    ).wait()[0]
    data = operations.allgather([payload], name=f"{name}.data", process_set=process_set, wake=False).wait()[0]
    return [pickle.loads(part.tobytes()) for part in np.split(data, np.cumsum(sizes)[:-1])]


def broadcast_bytes(payload: bytes, root_rank: int, name: str | None, process_set: ProcessSet) -> bytes:
    """Rank `root_rank`'s payload, on every rank."""
    name = name or "broadcast_object"
    size = _broadcast(np.array([len(payload)], np.int64), root_rank, f"{name}.size", process_set)
    is_root = current().membership.rank == root_rank
    data = np.frombuffer(payload, np.uint8) if is_root else np.empty(int(size[0]), np.uint8)
    return _broadcast(data, root_rank, f"{name}.data", process_set).tobytes()


def check_trust(what: str) -> None:
    """Raise ConfigurationError in a job whose members have not proved anything."""
    if not current().has_secret:
        raise ConfigurationError(
            f"{what} unpickles what other processes send, which lets them run code here; this job has no secret, so "
            f"anybody could be one of them. Start it with `phalanx run`, or set {SECRET} alike for all tasks."
        )


def _broadcast(array: Array, root_rank: int, name: str, process_set: ProcessSet) -> Array:
    result: Array = operations.broadcast([array], root_rank, name=name, process_set=process_set, wake=False).wait()[0]
    return result
