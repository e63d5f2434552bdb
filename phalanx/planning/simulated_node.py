"""A simulated member of a job, for a program that `phalanx plan` examines. The other members do not exist."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cluster.membership import FIRST_GENERATION, Member, Membership
from phalanx.cluster.node import FixedNode
from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.spec import WORKER, Task
from phalanx.cluster.task_comparison import JobFacts
from phalanx.cluster.task_identity import TaskIdentity
from phalanx.collectives.host.host_communicator import HostCommunicator
from phalanx.collectives.host.mesh import Mesh
from phalanx.collectives.host.recording_algorithm import RecordingAlgorithm
from phalanx.config.job_config import JobConfig


@dataclass(eq=False)
class SimulatedNode(FixedNode):
    """Rank 0 of a simulated job.

    Attributes:
        recording: Algorithm that records what this rank contributes to each collective.
    """

    recording: RecordingAlgorithm

    def connect(self) -> HostCommunicator:
        """Return the communicator of all members. Only this member computes."""
        return HostCommunicator(Mesh(self.membership), self.recording, "simulated", self.config.timeout_s)


def simulate_node(cluster: ClusterResolver, facts: JobFacts, config: JobConfig, replicas: int) -> SimulatedNode:
    """Return this process as the first of `replicas` members, each on a different host."""
    me = TaskIdentity(cluster.cluster_spec(), cluster.task() or Task(WORKER, 0), facts, config)
    own = me.description
    members = tuple(
        Member(rank, f"{WORKER}/{rank}", f"{own.host}-{rank}", own.address, own.pid) for rank in range(replicas)
    )
    membership = Membership(FIRST_GENERATION, 0, members)
    return SimulatedNode(me, membership, None, RecordingAlgorithm(membership))
