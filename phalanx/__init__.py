"""Phalanx: distributed training for Keras 3, on JAX, TensorFlow and PyTorch.

Names are imported on first use, so that `import phalanx` and the command line start quickly, and no backend is imported
before the program has chosen one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.compat.unsupported_names import missing_attribute
from phalanx.version import __version__

if TYPE_CHECKING:  # `as` exports a name
    from phalanx import callbacks as callbacks
    from phalanx import cluster_resolver as cluster_resolver
    from phalanx import compression as compression
    from phalanx import config as config
    from phalanx import coordinator as coordinator
    from phalanx import data as data
    from phalanx import elastic as elastic
    from phalanx import errors as errors
    from phalanx import experimental as experimental
    from phalanx import losses as losses
    from phalanx import tpu as tpu
    from phalanx import tuning as tuning
    from phalanx.checkpoint.sharded_checkpoint import ShardedCheckpoint as ShardedCheckpoint
    from phalanx.cluster import ClusterSpec as ClusterSpec
    from phalanx.cluster import KubernetesClusterResolver as KubernetesClusterResolver
    from phalanx.cluster import MPIClusterResolver as MPIClusterResolver
    from phalanx.cluster import SimpleClusterResolver as SimpleClusterResolver
    from phalanx.cluster import SlurmClusterResolver as SlurmClusterResolver
    from phalanx.cluster import Task as Task
    from phalanx.cluster import TFConfigClusterResolver as TFConfigClusterResolver
    from phalanx.cluster import TPUClusterResolver as TPUClusterResolver
    from phalanx.cluster import resolve as resolve
    from phalanx.collectives import CollectiveCommunication as CollectiveCommunication
    from phalanx.collectives import CommunicationImplementation as CommunicationImplementation
    from phalanx.collectives import CommunicationOptions as CommunicationOptions
    from phalanx.collectives import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from phalanx.collectives import NcclAllReduce as NcclAllReduce
    from phalanx.collectives import ReduceOp as ReduceOp
    from phalanx.collectives import ReductionToOneDevice as ReductionToOneDevice
    from phalanx.data import AutoShardPolicy as AutoShardPolicy
    from phalanx.data import DatasetCreator as DatasetCreator
    from phalanx.data import DistributedDataset as DistributedDataset
    from phalanx.data import DistributedIterator as DistributedIterator
    from phalanx.data import InputContext as InputContext
    from phalanx.data import InputOptions as InputOptions
    from phalanx.data import InputReplicationMode as InputReplicationMode
    from phalanx.errors import CollectiveMismatchError as CollectiveMismatchError
    from phalanx.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from phalanx.errors import ConfigurationError as ConfigurationError
    from phalanx.errors import DisagreementError as DisagreementError
    from phalanx.errors import MembershipChangedError as MembershipChangedError
    from phalanx.errors import PeerLostError as PeerLostError
    from phalanx.errors import PhalanxError as PhalanxError
    from phalanx.errors import RendezvousError as RendezvousError
    from phalanx.errors import UnsupportedError as UnsupportedError
    from phalanx.evaluator import SidecarEvaluator as SidecarEvaluator
    from phalanx.launcher.launch_function import launch as launch
    from phalanx.parameter_server.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
    from phalanx.parameter_server.partitioners import MaxSizePartitioner as MaxSizePartitioner
    from phalanx.parameter_server.partitioners import MinSizePartitioner as MinSizePartitioner
    from phalanx.strategies import CentralStorageStrategy as CentralStorageStrategy
    from phalanx.strategies import DiLoCoStrategy as DiLoCoStrategy
    from phalanx.strategies import LocalSGDStrategy as LocalSGDStrategy
    from phalanx.strategies import MirroredStrategy as MirroredStrategy
    from phalanx.strategies import ModelParallelStrategy as ModelParallelStrategy
    from phalanx.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from phalanx.strategies import OneDeviceStrategy as OneDeviceStrategy
    from phalanx.strategies import ParameterServerStrategy as ParameterServerStrategy
    from phalanx.strategies import ReplicaContext as ReplicaContext
    from phalanx.strategies import RunOptions as RunOptions
    from phalanx.strategies import Server as Server
    from phalanx.strategies import ShardedStrategy as ShardedStrategy
    from phalanx.strategies import Strategy as Strategy
    from phalanx.strategies import StrategyExtended as StrategyExtended
    from phalanx.strategies import TPUStrategy as TPUStrategy
    from phalanx.strategies import ValueContext as ValueContext
    from phalanx.strategies import experimental_set_strategy as experimental_set_strategy
    from phalanx.strategies import get_replica_context as get_replica_context
    from phalanx.strategies import get_strategy as get_strategy
    from phalanx.strategies import has_strategy as has_strategy
    from phalanx.strategies import in_cross_replica_context as in_cross_replica_context
    from phalanx.strategies import leave_job as leave_job
    from phalanx.strategies.loss_scaling import compute_average_loss as compute_average_loss
    from phalanx.strategies.loss_scaling import scale_regularization_loss as scale_regularization_loss
    from phalanx.supervisor import ManagedSession as ManagedSession
    from phalanx.supervisor import Saver as Saver
    from phalanx.supervisor import Supervisor as Supervisor
    from phalanx.training.steps.outer_optimizer import OuterSGD as OuterSGD

# The public names of each module, imported on first use; for this package, its submodules.
_EXPORTS = {
    "phalanx": (
        "callbacks cluster_resolver compression config coordinator data elastic errors experimental losses tpu tuning"
    ),
    "phalanx.cluster": (
        "ClusterSpec KubernetesClusterResolver MPIClusterResolver SimpleClusterResolver SlurmClusterResolver "
        "TFConfigClusterResolver TPUClusterResolver Task resolve"
    ),
    "phalanx.checkpoint.sharded_checkpoint": "ShardedCheckpoint",
    "phalanx.collectives": (
        "CollectiveCommunication CommunicationImplementation CommunicationOptions HierarchicalCopyAllReduce "
        "NcclAllReduce ReduceOp ReductionToOneDevice"
    ),
    "phalanx.errors": (
        "CollectiveMismatchError CollectiveTimeoutError ConfigurationError DisagreementError MembershipChangedError "
        "PeerLostError PhalanxError RendezvousError UnsupportedError"
    ),
    "phalanx.data": (
        "AutoShardPolicy DatasetCreator DistributedDataset DistributedIterator InputContext InputOptions "
        "InputReplicationMode"
    ),
    "phalanx.launcher.launch_function": "launch",
    "phalanx.strategies": (
        "CentralStorageStrategy DiLoCoStrategy LocalSGDStrategy MirroredStrategy ModelParallelStrategy "
        "MultiWorkerMirroredStrategy OneDeviceStrategy ParameterServerStrategy ReplicaContext RunOptions Server "
        "ShardedStrategy Strategy StrategyExtended TPUStrategy ValueContext experimental_set_strategy "
        "get_replica_context get_strategy has_strategy in_cross_replica_context leave_job"
    ),
    "phalanx.parameter_server.partitioners": "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner",
    "phalanx.evaluator": "SidecarEvaluator",
    "phalanx.supervisor": "ManagedSession Saver Supervisor",
    "phalanx.training.steps.outer_optimizer": "OuterSGD",
    "phalanx.strategies.loss_scaling": "compute_average_loss scale_regularization_loss",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise missing_attribute(__name__, name)
    # Before the first strategy, so that an error in its arguments exits the process with the exit code of that error.
    importlib.import_module("phalanx.runtime.process_exit").install()
    if module == __name__:
        return importlib.import_module(f"phalanx.{name}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return list(__all__)
