"""A cluster composed of the results of several resolvers."""

from __future__ import annotations

from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.spec import ClusterSpec
from phalanx.errors import ConfigurationError


class UnionResolver(ClusterResolver):
    """The combined tasks of several resolvers (`tf.distribute.cluster_resolver.UnionResolver`).

    Lists of the same task type are concatenated in the order of the resolvers; tasks with explicit indices keep them.
    This process's task, the master and the accelerators are those of the first resolver, unless given here.

    Args:
        resolvers: One or more resolvers.
        task_type: See `ClusterResolver`.
        task_id: See `ClusterResolver`.
        rpc_layer: See `ClusterResolver`.

    Raises: ConfigurationError without resolvers; from `cluster_spec()`, if resolvers give one task different addresses,
        or if one gives a list where another gives indices.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ):
        others = [resolver for resolver in resolvers if not isinstance(resolver, ClusterResolver)]
        if not resolvers or others:
            what = f"{others[0]!r}" if others else "nothing"
            raise ConfigurationError(f"UnionResolver got {what}; pass one cluster resolver or more.")
        first = resolvers[0]
        super().__init__(task_type, task_id, rpc_layer or first.rpc_layer)
        self._resolvers = resolvers
        self._environment = first.environment

    @property
    def task_type(self) -> str | None:
        return self._task_type if self._task_type is not None else self._resolvers[0].task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        return self._task_id if self._task_id is not None else self._resolvers[0].task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        merged: dict[str, list[str] | dict[int, str]] = {}
        for resolver in self._resolvers:
            for job_name, tasks in resolver.cluster_spec().as_dict().items():
                merged[job_name] = _union(job_name, merged.get(job_name), tasks)
        return ClusterSpec(merged)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _union(
    job_name: str, one: list[str] | dict[int, str] | None, other: list[str] | dict[int, str]
) -> list[str] | dict[int, str]:
    if one is None:
        return other
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *other]
    if isinstance(one, list) or isinstance(other, list):
        raise ConfigurationError(
            f"Of the tasks {job_name!r}, one resolver gives a list and another indices, so it is unknown which follow "
            f"which. Give all of them indices: {{{job_name!r}: {{0: 'host:port', ...}}}}."
        )
    for index in one.keys() & other.keys():
        if one[index] != other[index]:
            raise ConfigurationError(
                f"{job_name}/{index} is at {one[index]} according to one resolver, and at {other[index]} according to "
                f"another."
            )
    return one | other
