"""A cluster that the program itself describes."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cluster.resolvers.base_resolver import ClusterResolver, format_master_url
from phalanx.cluster.spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Answers what it was given.

    >>> spec = ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
    >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)

    Args:
        cluster_spec: the cluster; what `ClusterSpec` takes is taken too.
        master: what `master()` answers when it is asked for no particular task.
        num_accelerators: what `num_accelerators()` answers, {} if not given.
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
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators or {}
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    @property
    def environment(self) -> str:
        return self._environment

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the named task, else the `master` given at construction."""
        if task_type is None or task_id is None:
            return format_master_url(self._master, (rpc_layer or self.rpc_layer) if self._master else None)
        return format_master_url(self._cluster_spec.task_address(task_type, task_id), rpc_layer or self.rpc_layer)
