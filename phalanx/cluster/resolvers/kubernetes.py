"""The cluster of an indexed Job or a StatefulSet in Kubernetes. The API server is not queried."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from phalanx.cluster.resolvers.base_resolver import ClusterResolver, port_base, whole_number
from phalanx.cluster.spec import WORKER, ClusterSpec, Task
from phalanx.config.environment_variables import NUM_WORKERS, SERVICE
from phalanx.errors import ConfigurationError

_READER = "KubernetesClusterResolver"


class KubernetesClusterResolver(ClusterResolver):
    """One worker for each pod, numbered as Kubernetes numbers them.

    The index is JOB_COMPLETION_INDEX (a Job with `completionMode: Indexed`), or else the end of the pod's host name
    (StatefulSet: `train-3`). Pod `i` has the address `<name>-<i>.<service>`, so both kinds need a headless service
    (`clusterIP: None`, with `publishNotReadyAddresses: true`, since the pods look for each other before they are
    ready), and a Job's pod template needs `subdomain: <service>`. All pods listen on the same port, 8888 or
    PHALANX_PORT_BASE.

    Set PHALANX_NUM_WORKERS and PHALANX_SERVICE in the pod template; Kubernetes does not provide them.

    Args:
        num_workers: the number of pods, instead of PHALANX_NUM_WORKERS.
        service: the name of the headless service, instead of PHALANX_SERVICE.
        port: the port of every pod, instead of PHALANX_PORT_BASE.
        rpc_layer: the result of `rpc_layer`.
        environ: the variables to read; the process's environment if not given.
        hostname: this pod's host name; the system's if not given.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        service: str | None = None,
        port: int | None = None,
        rpc_layer: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        hostname: str | None = None,
    ):
        super().__init__(rpc_layer=rpc_layer, environ=environ)
        self._num_workers = num_workers
        self._service = service
        self._port = port
        self._hostname = hostname

    def cluster_spec(self) -> ClusterSpec:
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

    def _find_task(self) -> Task:
        return Task(WORKER, self._index())

    def _count(self) -> int:
        if self._num_workers is not None:
            count = self._num_workers
        elif self._variables.get(NUM_WORKERS):
            count = whole_number(self._variables, NUM_WORKERS, reader=_READER)
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
            return whole_number(self._variables, "JOB_COMPLETION_INDEX", reader=_READER)
        return int(self._ordinal_match()[2])

    def _base_name(self) -> str:
        return str(self._ordinal_match()[1])

    def _ordinal_match(self) -> re.Match[str]:
        # The short name: a pod's host name may be fully qualified (setHostnameAsFQDN).
        hostname = (self._hostname or socket.gethostname()).split(".")[0]
        match = re.fullmatch(r"(.+)-([0-9]{1,9})", hostname)
        if match is None:
            raise ConfigurationError(
                f"this pod is named {hostname!r}, which does not end in an index like 'train-0'. Use a "
                f"StatefulSet or a Job with completionMode: Indexed, without `hostname` in the pod template."
            )
        return match


def started_by_kubernetes(environ: Mapping[str, str]) -> bool:
    """Whether this is a pod of an indexed Job, or one with PHALANX_NUM_WORKERS."""
    return "KUBERNETES_SERVICE_HOST" in environ and ("JOB_COMPLETION_INDEX" in environ or NUM_WORKERS in environ)
