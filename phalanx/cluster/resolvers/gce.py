"""The cluster of a Google Compute Engine instance group."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from phalanx.cluster.resolvers.base_resolver import ClusterResolver, format_master_url
from phalanx.cluster.spec import WORKER, ClusterSpec
from phalanx.errors import ConfigurationError, RendezvousError

PACKAGE = "google-api-python-client"


class GCEClusterResolver(ClusterResolver):
    """One task per running instance of an instance group, in the order of their addresses.

    Each call of `cluster_spec` queries the API.

    Args:
        project: The instance group's project.
        zone: Its zone.
        instance_group: Its name.
        port: Port of every task.
        task_type: The type of all tasks.
        task_id: This instance's index, different on each.
        rpc_layer: Value of the property `rpc_layer`.
        credentials: Credentials for the API; "default" selects the application's default credentials.
        service: A result of `googleapiclient.discovery.build("compute", "v1")`; None to call it. If given, credentials
            have no effect.

    Raises: ConfigurationError if the API's package is needed and not installed.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = WORKER,
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ):
        super().__init__(task_type, task_id, rpc_layer)
        self._group = {"project": project, "zone": zone}
        self._name = instance_group
        self._port = port
        self._service = _build_service(credentials) if service is None else service

    def cluster_spec(self) -> ClusterSpec:
        """Return the running instances of the group.

        Raises: RendezvousError if there are none.
        """
        groups, addresses = self._service.instanceGroups(), []
        request = groups.listInstances(
            **self._group, instanceGroup=self._name, body={"instanceState": "RUNNING"}, orderBy="name"
        )
        while request is not None:
            response = request.execute()
            for instance in response.get("items", ()):
                name = instance["instance"].rpartition("/")[2]
                details = self._service.instances().get(**self._group, instance=name).execute()
                addresses.append(f"{details['networkInterfaces'][0]['networkIP']}:{self._port}")
            request = groups.listInstances_next(previous_request=request, previous_response=response)
        if not addresses:
            raise RendezvousError(
                f"No instance of the group {self._name!r} in {self._group['zone']} runs. Wait until the group has its "
                f"size, then create the strategy."
            )
        return ClusterSpec({str(self._task_type): sorted(addresses)})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task (by default this one)."""
        task_type = task_type if task_type is not None else self.task_type
        task_id = task_id if task_id is not None else self.task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return format_master_url(address, rpc_layer or self.rpc_layer)

    @property
    def task_type(self) -> str | None:
        """The type of all tasks of the group."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise ConfigurationError(
            f"The type of the tasks of an instance group cannot change from {self._task_type!r} to {task_type!r}. Pass "
            f"task_type= when you create the GCEClusterResolver."
        )


def _build_service(credentials: Any) -> Any:
    if importlib.util.find_spec("googleapiclient") is None:
        raise ConfigurationError(
            f"GCEClusterResolver asks the API of Compute Engine, which needs the package {PACKAGE}: pip install "
            f"{PACKAGE}. Or pass a SimpleClusterResolver with the addresses of all instances."
        )
    discovery = importlib.import_module("googleapiclient.discovery")
    return discovery.build("compute", "v1", credentials=None if credentials == "default" else credentials)
