"""The members of a job: cluster descriptions, the resolvers that find them, and the rendezvous."""

from __future__ import annotations

from phalanx.cluster.membership import Member, Membership, Rank
from phalanx.cluster.node import Node, join
from phalanx.cluster.resolvers import (
    ClusterResolver,
    KubernetesClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
)
from phalanx.cluster.resolvers.auto_resolver import resolve
from phalanx.cluster.spec import ClusterSpec, Task
from phalanx.cluster.task_comparison import JobFacts

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "JobFacts",
    "KubernetesClusterResolver",
    "MPIClusterResolver",
    "Member",
    "Membership",
    "Node",
    "Rank",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "Task",
    "join",
    "resolve",
]
