"""The names of `tf.distribute.cluster_resolver`."""

from __future__ import annotations

from typing import Any

from phalanx.cluster import resolvers
from phalanx.cluster.resolvers import *  # noqa: F403
from phalanx.compat.unsupported_names import missing_attribute

__all__ = [*resolvers.__all__]


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
