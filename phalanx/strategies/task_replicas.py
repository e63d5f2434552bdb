"""The replicas of tasks with several devices: each task starts one process for every device but the first.

The tasks connect as the cluster describes them, and exchange their numbers of devices. If all have one, the tasks are
the job. Otherwise each task opens a port per replica, and all replicas form the job; they run the same program with the
identity of their task. The tasks keep their first ports open for processes that check whether the job is alive.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import chain

import msgspec

from phalanx.cluster.node import Node
from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.cluster.spec import CHIEF, RANKED_TYPES, WORKER, ClusterSpec
from phalanx.collectives.communicator import Communicator
from phalanx.config.environment import process_environment, set_variables
from phalanx.config.environment_variables import JOB_ID, REPLICA_CLUSTER, TASK_REPLICAS, TF_CONFIG
from phalanx.devices.gpu_assignment import device_variables
from phalanx.devices.gpu_count import count_gpus
from phalanx.devices.replica_devices import replica_devices
from phalanx.errors import ConfigurationError
from phalanx.launcher.local_replicas import is_program, reserve_task_replicas
from phalanx.transport.address import LOOPBACK, Address
from phalanx.transport.decoding import decode_message

logger = logging.getLogger(__name__)


def replica_resolver(resolver: ClusterResolver) -> ClusterResolver:
    """The resolver of the cluster of all replicas, if tasks of the cluster have several; else the given one."""
    environment = process_environment()
    # A job started by this one inherits the variable, which does not describe its cluster.
    described = None if JOB_ID in environment else environment.get(REPLICA_CLUSTER)
    return resolver if described is None else TFConfigClusterResolver(environ={TF_CONFIG: described})


def task_devices(resolver: ClusterResolver) -> list[str] | None:
    """The devices of this task; this process uses the first. None if a launcher has started a process for each device,
    and for an evaluator.

    Raises: ConfigurationError if PHALANX_TASK_REPLICAS is not a positive number.
    """
    environment, spec, task = process_environment(), resolver.cluster_spec(), resolver.task()
    if JOB_ID in environment or REPLICA_CLUSTER in environment:
        return None
    if spec and (task is None or task.type not in RANKED_TYPES or task not in spec):
        return None
    gpus, asked = count_gpus(environment), environment.get(TASK_REPLICAS)
    if asked is not None and not (asked.isdigit() and int(asked) > 0):
        raise ConfigurationError(f"{TASK_REPLICAS} is {asked!r}; it must be a number of replicas, 1 or more.")
    hosts = [spec.address(other).host for other in spec.ranked_tasks]
    is_alone = not spec or task is None or hosts.count(spec.address(task).host) == 1
    count = int(asked) if asked is not None else max(1, gpus) if is_alone else 1
    if count > 1 and not is_program():
        logger.warning(
            "This task has %d devices and uses one: the replicas of the others would run this program again, which is "
            "impossible in a notebook, an interactive session and a test. Start one task for each device.",
            count,
        )
        count = 1
    return replica_devices(count, environment)


def start_task_replicas(node: Node, communicator: Communicator, devices: Sequence[str]) -> bool:
    """Start the other replicas of this task, if any task has several devices. All tasks must call this. Afterwards,
    `replica_resolver` finds all replicas.

    Args:
        devices: The devices of this task.
    """
    # Two exchanges: ports are opened only if some task has several devices, but then on all tasks.
    device_counts = [decode_message(own, int) for own in _gather(communicator, len(devices))]
    if max(device_counts) == 1:
        return False
    spec = node.identity.spec
    host = LOOPBACK if not spec or node.identity.address.is_loopback else node.identity.address.host
    reserved = reserve_task_replicas(len(devices), host)
    own = [str(Address(host, port)) for port in reserved.ports]
    addresses = [decode_message(each, list[str]) for each in _gather(communicator, own)]
    cluster = cluster_of_replicas(spec, list(chain.from_iterable(addresses)))
    names = [str(task) for task in ClusterSpec(cluster).ranked_tasks]
    first = sum(device_counts[: communicator.rank])  # rank of this task's first replica
    environment = process_environment()
    settings = [
        {
            REPLICA_CLUSTER: json.dumps({"cluster": cluster, "task": _task(names[first + number])}),
            **(device_variables(device, environment) if len(devices) > 1 else {}),
        }
        for number, device in enumerate(devices)
    ]
    reserved.start(names, first, settings, ends_program=True)
    return True


def hide_other_devices(devices: Sequence[str]) -> None:
    """Hide all devices of the task but the first from this process, before it queries any."""
    if len(devices) > 1:
        set_variables(device_variables(devices[0], process_environment()))


def cluster_of_replicas(spec: ClusterSpec, addresses: Sequence[str]) -> dict[str, list[str]]:
    """The cluster whose ranked tasks are these replicas; the first belongs to the chief's task.

    >>> cluster_of_replicas(ClusterSpec({"chief": ["a:1"], "worker": ["b:1"]}), ["a:2", "a:3", "b:2"])
    {'chief': ['a:2'], 'worker': ['a:3', 'b:2']}
    """
    chief = [addresses[0]] if CHIEF in spec.jobs else []
    kinds = {CHIEF: chief, WORKER: list(addresses[len(chief) :])}
    return {kind: found for kind, found in kinds.items() if found}


def _gather(communicator: Communicator, own: object) -> list[bytes]:
    content = msgspec.msgpack.encode(own)
    return communicator.all_gather_bytes(content) if communicator.world_size > 1 else [content]


def _task(name: str) -> dict[str, object]:
    kind, _, index = name.partition("/")
    return {"type": kind, "index": int(index)}
