"""A cluster described by the program."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cluster.resolvers.base_resolver import ClusterResolver, format_master_url
from phalanx.cluster.spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Returns the given cluster.

    >>> spec = ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
    >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)

    Args:
        cluster_spec: The cluster, or any argument of `ClusterSpec`.
        master: Result of `master()` without a task.
        task_type: The type of this process's task.
        task_id: Its index.
        environment: Value of the property.
        num_accelerators: Result of `num_accelerators()`, {} if not given.
        rpc_layer: Value of the property.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, list[str]],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ):
        super().__init__(task_type, task_id, rpc_layer)
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master = master
        self._environment = environment
        self._num_accelerators = num_accelerators or {}

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the named task, or else the `master` given at construction."""
        if task_type is None or task_id is None:
            return format_master_url(self._master, (rpc_layer or self.rpc_layer) if self._master else None)
        return format_master_url(self._cluster_spec.task_address(task_type, task_id), rpc_layer or self.rpc_layer)
