"""A member of a job, and `join`, which makes this process a member."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from phalanx.cluster.membership import FIRST_GENERATION, Membership
from phalanx.cluster.peer_identification import PROBE, ProbeService
from phalanx.cluster.rendezvous import gather_members
from phalanx.cluster.resolvers import ClusterResolver
from phalanx.cluster.spec import EVALUATOR, PS, WORKER, ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.job_config import JobConfig
from phalanx.config.plan_request import PlanRequest
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.transport.listener import Listener


class Node(ABC):
    """Owns the resources of a member: the links to the other members, and the port for later connections.

    Attributes:
        identity: This process's task and its connections.
        membership: The members, with links between them.
        listener: The port, on which services can be registered; None in a world of size one, unless an evaluator
            probes it.
    """

    identity: TaskIdentity
    membership: Membership
    listener: Listener | None

    @property
    def task(self) -> Task:
        """The task of this process."""
        return self.identity.task

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The whole cluster; empty if there is none."""
        return self.identity.spec

    @property
    def config(self) -> JobConfig:
        """The configuration of the job."""
        return self.identity.config

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self, *, flush: bool = True) -> None:
        """Leave the job: close the links and free the port. Safe to call twice.

        Args:
            flush: Whether to wait until all bytes sent have arrived, as a process that has finished does.
        """


@dataclass(eq=False)
class FixedNode(Node):
    """A member of a job of fixed size."""

    identity: TaskIdentity
    membership: Membership
    listener: Listener | None

    def close(self, *, flush: bool = True) -> None:
        self.membership.close(flush=flush)
        if self.listener is not None:
            self.listener.close()


def join(
    cluster: ClusterResolver | ClusterSpec,
    task: Task | None = None,
    *,
    facts: JobFacts | None = None,
    config: JobConfig | None = None,
    timeout_s: float | None = None,
) -> FixedNode:
    """Find the other tasks of the cluster; return when all of them are linked to each other.

    A cluster without tasks, a cluster with a single worker, and an evaluator's task are each a world of size one, which
    does not wait. Parameter servers and evaluators never count.

    >>> node = join(ClusterSpec({}))
    >>> node.membership.rank, node.membership.world_size
    (0, 1)

    Args:
        cluster: The cluster, or a resolver for it and this process's task.
        task: This process's task, if `cluster` is a spec; otherwise it replaces the resolver's.
        facts: Facts that all tasks must agree on, in addition to the cluster and the version of Phalanx.
        config: The configuration; read from the environment if not given.
        timeout_s: Seconds to wait for the others; PHALANX_RENDEZVOUS_TIMEOUT if not given.

    Raises:
        ConfigurationError: the cluster's description is invalid, the port is taken, or the task is already running.
        RendezvousError: tasks did not arrive in time; the message names them and the reasons.
        DisagreementError: tasks differ in what must be equal; raised on all of them with the same message.
        HandshakeError: a task has a different secret, or another program listens at its address.
        UnsupportedError: this process is a parameter server, or `phalanx plan` examines the program.
    """
    config = config or JobConfig.from_environment()
    if PlanRequest.from_environment() is not None:
        raise UnsupportedError(
            "`phalanx plan` examines the fit() of a model under MirroredStrategy, MultiWorkerMirroredStrategy or a "
            "strategy of local SGD, and this program joins its job in another way (Horovod, parameter servers). See "
            "docs/how-to/planning.md."
        )
    spec = cluster if isinstance(cluster, ClusterSpec) else cluster.cluster_spec()
    if task is None and isinstance(cluster, ClusterResolver):
        task = cluster.task()
    if not spec:
        return _single_process_node(TaskIdentity(spec, task or Task(WORKER, 0), facts or JobFacts(), config))
    if task is None:
        raise ConfigurationError(
            f"the cluster has the tasks {', '.join(map(str, spec.tasks))}, but this process does not know "
            f"which of them it is. Set `task` in TF_CONFIG, or task_type and task_id to the resolver."
        )
    spec.check_member(task)
    if task.type == PS:
        raise UnsupportedError(
            f"{task} is a parameter server, which does not take part in synchronous training. Run it with "
            f"ParameterServerStrategy, or start this process as a worker."
        )
    identity = TaskIdentity(spec, task, facts or JobFacts(), config)
    if task.type == EVALUATOR or len(spec.ranked_tasks) == 1:
        return _single_process_node(identity)
    membership, listener = gather_members(identity, config.rendezvous_timeout_s if timeout_s is None else timeout_s)
    return FixedNode(identity, membership, listener)


def _single_process_node(identity: TaskIdentity) -> FixedNode:
    membership = Membership(FIRST_GENERATION, 0, (identity.description.as_member(0),))
    listener = None
    if identity.config.listen_fd is not None and identity.task.type != EVALUATOR and EVALUATOR in identity.spec.jobs:
        listener = _open_probe_port(identity)
    return FixedNode(identity, membership, listener)


def _open_probe_port(identity: TaskIdentity) -> Listener:
    """Answer evaluators that check whether the job is alive, on the port that the launcher opened."""
    listener = identity.open_listener()
    listener.register(PROBE, ProbeService(identity))
    listener.start()
    return listener
