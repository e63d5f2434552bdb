"""Functions scheduled on workers, with parameter servers behind them (`tf.distribute.coordinator`)."""

from phalanx.coordinator.cluster_coordinator import ClusterCoordinator
from phalanx.coordinator.remote import (
    OutOfRangeError,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
)

__all__ = [
    "ClusterCoordinator",
    "OutOfRangeError",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValues",
    "RemoteValue",
]
