"""The names that `tf.distribute.cluster_resolver` has."""

from __future__ import annotations

from typing import Any

from phalanx.cluster.resolvers import (
    ClusterResolver,
    KubernetesClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from phalanx.compat.unsupported_names import absent

__all__ = [
    "ClusterResolver",
    "KubernetesClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name)
