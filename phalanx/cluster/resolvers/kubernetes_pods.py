"""The pods of a cluster, as listed by the Kubernetes API server."""

from __future__ import annotations

import enum
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.errors import ConfigurationError, RendezvousError
from phalanx.transport.address import Address

PACKAGE = "kubernetes"
DEFAULT_LABELS = {"worker": ["job-name=tensorflow"]}
"""The default in `tf.distribute`."""


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs, which determines where the API server's address and credentials are."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class PodLister:
    """Lists the pods with certain labels, again at each call.

    Args:
        labels: Task types with the label selectors of their pods.
        port: Port of every pod.
        client: A `CoreV1Api`; None to create one.
        location: Location of the credentials for a new client.

    Raises: ConfigurationError if the client's package is not installed.
    """

    def __init__(
        self,
        labels: Mapping[str, Sequence[str]],
        port: int,
        client: Any = None,
        location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ) -> None:
        for job, selectors in labels.items():
            if isinstance(selectors, str):
                raise ConfigurationError(
                    f"job_to_label_mapping[{job!r}] is {selectors!r}; write a list of label selectors, [{selectors!r}]."
                )
        self._labels = labels
        self._port = port
        self._client = client or _make_client(location)

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of these pods, ordered by selector and then by name.

        Raises: RendezvousError naming a pod that does not run, or labels that no pod has.
        """
        return ClusterSpec({job: [address for _, address in self._pods(job)] for job in self._labels})

    def task_of(self, pod_name: str) -> Task | None:
        """Return the task of a pod; None if it has none of the labels."""
        for job in self._labels:
            names = [name for name, _ in self._pods(job)]
            if pod_name in names:
                return Task(job, names.index(pod_name))
        return None

    def _pods(self, job: str) -> list[tuple[str, str]]:
        """Return the names and addresses of a task type's pods."""
        found = []
        for selector in self._labels[job]:
            pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
            if not pods:
                raise RendezvousError(f"There is no pod with the label {selector!r}, which is to be a {job}.")
            for pod in sorted(pods, key=lambda pod: str(pod.metadata.name)):
                if pod.status.phase != "Running":
                    raise RendezvousError(
                        f"The pod {pod.metadata.name!r} with the label {selector!r} is not running; its phase is "
                        f"{pod.status.phase!r}. Wait until all pods run, then create the strategy."
                    )
                # Unlike tf.distribute, not the host's address: two pods on one host would have the same one.
                address = getattr(pod.status, "pod_ip", None) or pod.status.host_ip
                found.append((str(pod.metadata.name), str(Address(str(address), self._port))))
        return found


def _make_client(location: KubernetesExecutableLocation) -> Any:
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigurationError(
            f"KubernetesClusterResolver(job_to_label_mapping=...) asks the API server, which needs the package "
            f"{PACKAGE}: pip install {PACKAGE}. Without labels, pods learn their cluster from variables, and need no "
            f"package."
        )
    config = importlib.import_module(f"{PACKAGE}.config")
    if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
        config.load_incluster_config()
    elif location is KubernetesExecutableLocation.OFF_CLUSTER:
        config.load_kube_config()
    else:
        raise ConfigurationError(
            f"executable_location is {location!r}; write a KubernetesExecutableLocation: WITHIN_CLUSTER or OFF_CLUSTER."
        )
    return importlib.import_module(f"{PACKAGE}.client").CoreV1Api()
