"""The names that `tf.distribute.experimental` has."""

from __future__ import annotations

from typing import Any

from phalanx import coordinator
from phalanx.cluster.resolvers.resolver import ClusterResolver
from phalanx.collectives import CollectiveCommunication, CommunicationImplementation, CommunicationOptions
from phalanx.collectives.options import CollectiveHints
from phalanx.parameter_server import partition as partitioners
from phalanx.strategies import CentralStorageStrategy, ParameterServerStrategy, ValueContext
from phalanx.strategies import MultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "ValueContext",
    "coordinator",
    "partitioners",
]


class MultiWorkerMirroredStrategy(_MultiWorkerMirroredStrategy):
    """`phalanx.MultiWorkerMirroredStrategy` with the arguments of its experimental namesake.

    Args:
        communication: a `CollectiveCommunication`.
        cluster_resolver: where the cluster and this task come from.
    """

    def __init__(
        self,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ):
        super().__init__(cluster_resolver, communication=communication)


_RESUMING = "phalanx.callbacks.Checkpoint saves when the job is told to end, and resumes at the exact step."
_INSTEAD = {
    "PreemptionCheckpointHandler": _RESUMING,
    "PreemptionWatcher": _RESUMING,
    "TerminationConfig": "set PHALANX_PREEMPTION_SIGNAL to the signal by which the job is told to end.",
    "TPUStrategy": "there is no strategy for TPUs; on JAX, keras.distribution.DataParallel trains on several.",
    "rpc": "schedule functions with phalanx.coordinator.ClusterCoordinator.",
}
"""Of names that `tf.distribute.experimental` has: what to do without."""


def __getattr__(name: str) -> Any:
    instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module 'phalanx.experimental' has no attribute {name!r}{instead}")
