"""Cluster resolvers, one per scheduler and file; `auto_resolver` picks one."""

from __future__ import annotations

from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.cluster.resolvers.gce import GCEClusterResolver
from phalanx.cluster.resolvers.kubernetes import KubernetesClusterResolver
from phalanx.cluster.resolvers.kubernetes_pods import KubernetesExecutableLocation
from phalanx.cluster.resolvers.mpi import MPIClusterResolver
from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.resolvers.slurm import SlurmClusterResolver
from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.cluster.resolvers.tpu import TPUClusterResolver
from phalanx.cluster.resolvers.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]
