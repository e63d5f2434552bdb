"""The names of `tf.distribute.experimental`."""

from __future__ import annotations

from typing import Any

from phalanx import coordinator
from phalanx.cluster.resolvers.base_resolver import ClusterResolver
from phalanx.collectives import CollectiveCommunication, CommunicationImplementation, CommunicationOptions
from phalanx.collectives.options import CollectiveHints
from phalanx.compat.unsupported_names import missing_attribute
from phalanx.parameter_server import partitioners as partitioners
from phalanx.strategies import CentralStorageStrategy, ParameterServerStrategy, TPUStrategy, ValueContext
from phalanx.strategies import MultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy
from phalanx.strategies.preemption_handler import PreemptionCheckpointHandler, TerminationConfig

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
]


class MultiWorkerMirroredStrategy(_MultiWorkerMirroredStrategy):
    """`phalanx.MultiWorkerMirroredStrategy` with the arguments of its experimental namesake.

    Args:
        communication: A `CollectiveCommunication` that selects the algorithm.
        cluster_resolver: Resolver of the cluster and this task; found automatically if not given.
    """

    def __init__(
        self,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ):
        super().__init__(cluster_resolver, communication=communication)


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
