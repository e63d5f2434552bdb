"""Functions scheduled on workers, backed by parameter servers (`tf.distribute.coordinator`)."""

from phalanx.coordinator.cluster_coordinator import ClusterCoordinator
from phalanx.coordinator.current_worker import experimental_get_current_worker_index
from phalanx.coordinator.remote_values import (
    OutOfRangeError,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
)

PerWorkerValue = PerWorkerValues
"""Name in `tf.distribute.coordinator`; `PerWorkerValues` is the name in `tf.distribute.experimental.coordinator`."""

__all__ = [
    "ClusterCoordinator",
    "OutOfRangeError",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
