"""The cluster of pods in Kubernetes: of an indexed Job, a StatefulSet, or certain labels."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.cluster.resolvers.base_resolver import ClusterResolver, port_base, read_integer
from phalanx.cluster.resolvers.kubernetes_pods import DEFAULT_LABELS, KubernetesExecutableLocation, PodLister
from phalanx.cluster.spec import WORKER, ClusterSpec, Task
from phalanx.config.environment_variables import NUM_WORKERS, SERVICE
from phalanx.errors import ConfigurationError

DEFAULT_SERVER_PORT = 8470
"""The default in `tf.distribute`."""

_READER = "KubernetesClusterResolver"


class KubernetesClusterResolver(ClusterResolver):
    """One worker per pod, numbered as in Kubernetes; or one task per pod with certain labels.

    With `job_to_label_mapping` or `override_client`, as in `tf.distribute`: the API server lists the pods, which need
    permission to query it (`list` on `pods`) and the package `kubernetes`. A pod finds its task by its name, so
    `task_type` and `task_id` need not be set.

    Otherwise, the API server is not queried. The index is JOB_COMPLETION_INDEX (a Job with `completionMode: Indexed`),
    or else the end of the pod's host name (StatefulSet: `train-3`). Pod `i` has the address `<name>-<i>.<service>`, so
    both kinds need a headless service (`clusterIP: None`, with `publishNotReadyAddresses: true`, since the pods look
    for each other before they are ready), and a Job's pod template needs `subdomain: <service>`. All pods listen on the
    same port, 8888 or PHALANX_PORT_BASE.

    Set PHALANX_NUM_WORKERS and PHALANX_SERVICE in the pod template; Kubernetes does not provide them.

    Args:
        job_to_label_mapping: Task types with the label selectors of their pods, `{"worker": ["job-name=train"]}`.
        tf_server_port: Port of every pod with one of the labels.
        rpc_layer: Value of the property `rpc_layer`.
        override_client: A `kubernetes.client.CoreV1Api` with loaded credentials.
        executable_location: Whether the program runs in the cluster, which determines where credentials are.
        num_workers: Number of pods, instead of PHALANX_NUM_WORKERS.
        service: Name of the headless service, instead of PHALANX_SERVICE.
        port: Port of every pod, instead of PHALANX_PORT_BASE.
        environ: The variables to read; the process's environment if not given.
        hostname: This pod's host name; the system's if not given.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = DEFAULT_SERVER_PORT,
        rpc_layer: str | None = None,
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
        *,
        num_workers: int | None = None,
        service: str | None = None,
        port: int | None = None,
        environ: Mapping[str, str] | None = None,
        hostname: str | None = None,
    ):
        super().__init__(rpc_layer=rpc_layer, environ=environ)
        self._num_workers = num_workers
        self._service = service
        self._port = port
        self._hostname = hostname
        self._pods: PodLister | None = None
        if job_to_label_mapping or override_client is not None:
            labels = job_to_label_mapping or DEFAULT_LABELS
            self._pods = PodLister(labels, tf_server_port, override_client, executable_location)

    def cluster_spec(self) -> ClusterSpec:
        if self._pods is not None:
            return self._pods.cluster_spec()
        count = self._count()
        index = self._index()
        if index >= count:
            raise ConfigurationError(
                f"this pod has index {index}, but the job has {count} workers. Set {NUM_WORKERS} to the "
                f"Job's `completions` or the StatefulSet's `replicas`."
            )
        port = port_base(self._variables, self._port)
        if count == 1:
            return ClusterSpec({WORKER: [f"127.0.0.1:{port}"]})
        service = self._service or self._variables.get(SERVICE)
        if not service:
            raise ConfigurationError(
                f"{_READER} does not know the addresses of the {count} pods. Create a "
                f"headless service (clusterIP: None) and set {SERVICE} to its name in the pod template."
            )
        name = self._base_name()
        return ClusterSpec({WORKER: [f"{name}-{pod}.{service}:{port}" for pod in range(count)]})

    def _find_task(self) -> Task | None:
        if self._pods is not None:
            return self._pods.task_of(self._pod_name())
        return Task(WORKER, self._index())

    def _count(self) -> int:
        if self._num_workers is not None:
            count = self._num_workers
        elif self._variables.get(NUM_WORKERS):
            count = read_integer(self._variables, NUM_WORKERS, reader=_READER)
        else:
            raise ConfigurationError(
                f"{_READER} does not know how many pods the job has: Kubernetes provides only their index. "
                f"Set {NUM_WORKERS} in the pod template to the Job's `completions` or the StatefulSet's "
                f"`replicas`."
            )
        if count < 1:
            raise ConfigurationError(f"{NUM_WORKERS} is {count}; write at least 1.")
        return count

    def _index(self) -> int:
        if "JOB_COMPLETION_INDEX" in self._variables:
            return read_integer(self._variables, "JOB_COMPLETION_INDEX", reader=_READER)
        return int(self._ordinal_match()[2])

    def _base_name(self) -> str:
        return str(self._ordinal_match()[1])

    def _pod_name(self) -> str:
        # The short name: a pod's host name may be fully qualified (setHostnameAsFQDN).
        return (self._hostname or socket.gethostname()).split(".")[0]

    def _ordinal_match(self) -> re.Match[str]:
        hostname = self._pod_name()
        match = re.fullmatch(r"(.+)-([0-9]{1,9})", hostname)
        if match is None:
            raise ConfigurationError(
                f"this pod is named {hostname!r}, which does not end in an index like 'train-0'. Use a "
                f"StatefulSet or a Job with completionMode: Indexed, without `hostname` in the pod template."
            )
        return match


def started_by_kubernetes(environ: Mapping[str, str]) -> bool:
    """Return whether this is a pod of an indexed Job, or a pod with PHALANX_NUM_WORKERS."""
    return "KUBERNETES_SERVICE_HOST" in environ and ("JOB_COMPLETION_INDEX" in environ or NUM_WORKERS in environ)
