"""A process of an elastic job: its link to the coordinator, and its links to the other members."""

from __future__ import annotations

from phalanx.cluster import membership_messages as messages
from phalanx.cluster.member_links import MemberLinks
from phalanx.cluster.node import Node, join
from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.spec import RANKED_TYPES, ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.config.job_config import JobConfig
from phalanx.elastic.coordinator_client import CoordinatorClient
from phalanx.transport.link import wait_until_delivered
from phalanx.transport.listener import Listener


class ElasticNode(Node):
    """This process's place in an elastic job.

    Args:
        spec: The cluster; only this process's address is used.
        task: The task of this process.
        facts: Facts that all members must agree on.
        config: The configuration.

    Attributes:
        coordinator: Link to the elastic coordinator.
        links: Links to the other members.
        generation, addresses: Number and members of the last generation that was ordered, whether or not its links
            could be established.
        joined_late: Whether this process arrived after the job had begun.
        is_candidate: Whether this process does not yet take part in the running job.
        initial_world_size: Number of members when the job began.

    Raises: as `CoordinatorClient`.
    """

    listener: Listener

    def __init__(self, spec: ClusterSpec, task: Task, facts: JobFacts, config: JobConfig):
        # Only the coordinator has the addresses of all members.
        self.identity = identity = TaskIdentity(spec, task, facts, config, is_elastic=True)
        self.links = MemberLinks(identity)
        self.membership = self.links.membership
        self.generation = 0
        self.addresses: tuple[messages.MemberAddress, ...] = ()
        self._is_closed = False
        self.listener = identity.open_listener()
        self.listener.register(messages.MESH, self.links)
        self.listener.start()
        try:
            self.coordinator = CoordinatorClient(identity, self.links.generation_ended)
        except BaseException:
            self.listener.close()
            raise
        self.is_candidate = self.joined_late = self.coordinator.response.has_begun
        self.initial_world_size = self.coordinator.response.initial_world_size

    @property
    def is_regroup_requested(self) -> bool:
        """Whether this process, as the chief, is asked to leave the current generation."""
        return self.coordinator.regroup_requested == self.membership.generation

    def query_entry(self, entry: int) -> messages.EntryStarted | messages.EntryAlreadyFinished:
        """As a candidate, wait until the members have begun or finished this entry."""
        order = self.coordinator.request(messages.EntryQuery(entry))
        assert isinstance(order, messages.EntryStarted | messages.EntryAlreadyFinished), (
            "only processes that are ready become members"
        )
        return order

    def join(self, entry: int) -> messages.EntryAlreadyFinished | None:
        """As a candidate, wait until this process is a member or the members have finished this entry.

        Raises:
            GenerationNotFormedError: it became a member, but the generation could not be formed: continue with
                `regroup`.
            RendezvousError: the others did not arrive, or the job has failed.
        """
        order = self.coordinator.request(messages.ReadyToJoin(entry))
        if isinstance(order, messages.EntryAlreadyFinished):
            return order
        assert isinstance(order, messages.FormGeneration)
        self.is_candidate = False
        self._form(order)
        return None

    def regroup(self, report: messages.LossReport) -> None:
        """Leave the current generation; return when the next one, with this process, is formed.

        Raises:
            GenerationNotFormedError: the next generation could not be formed: report again.
            EvictedError, RendezvousError: this process, or the whole job, cannot continue.
        """
        order = self.coordinator.request(report)
        while not isinstance(order, messages.FormGeneration):  # the answer to an earlier request
            order = self.coordinator.next_order()
        self._form(order)

    def _form(self, order: messages.FormGeneration) -> None:
        # Before the links, which may fail: the next report is about this generation in any case.
        self.generation, self.addresses = order.generation, tuple(order.members)
        if order.generation == 1:
            self.initial_world_size = len(order.members)
        self.links.connect(order)
        self.membership = self.links.membership

    def close(self, *, flush: bool = True) -> None:
        """See `Node.close`; without `flush`, the others lose this process."""
        if self._is_closed:
            return
        self._is_closed = True
        # First the notice: without it, the end of a link is a loss.
        self.coordinator.close(last=messages.LeaveNotice() if flush else None)
        if flush:
            wait_until_delivered([*self.links.open_links, self.coordinator.link])
        self.coordinator.link.close()
        self.listener.close()  # before the links, so that none is adopted after they are closed
        self.links.close()


def join_node(cluster: ClusterResolver, facts: JobFacts, config: JobConfig) -> Node:
    """Join the job of this process: an elastic one if its launcher runs a coordinator, otherwise one of fixed size.

    Args:
        cluster: Provides the cluster and the task of this process.
        facts: Facts that all members must agree on.
        config: The configuration.

    Raises: as `cluster.node.join` or `ElasticNode`.
    """
    task = cluster.task()
    if config.elastic_coordinator is not None and task is not None and task.type in RANKED_TYPES:
        return ElasticNode(cluster.cluster_spec(), task, facts, config)
    return join(cluster, facts=facts, config=config)
