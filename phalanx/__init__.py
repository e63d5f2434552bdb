"""Phalanx: distributed training for Keras 3, on JAX, TensorFlow and PyTorch.

Names are imported when they are first used, so that `import phalanx` and the command line start at once and no
backend is imported before the program has chosen one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.compat.unsupported_names import missing_attribute
from phalanx.version import __version__

if TYPE_CHECKING:
    from phalanx import (
        callbacks,
        cluster_resolver,
        compression,
        config,
        coordinator,
        data,
        elastic,
        errors,
        experimental,
        losses,
        tpu,
        tuning,
    )
    from phalanx.checkpoint.sharded_checkpoint import ShardedCheckpoint
    from phalanx.cluster import (
        ClusterSpec,
        KubernetesClusterResolver,
        MPIClusterResolver,
        SimpleClusterResolver,
        SlurmClusterResolver,
        Task,
        TFConfigClusterResolver,
        TPUClusterResolver,
        resolve,
    )
    from phalanx.collectives import (
        CollectiveCommunication,
        CommunicationImplementation,
        CommunicationOptions,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReduceOp,
        ReductionToOneDevice,
    )
    from phalanx.data import (
        AutoShardPolicy,
        DatasetCreator,
        DistributedDataset,
        DistributedIterator,
        InputContext,
        InputOptions,
        InputReplicationMode,
    )
    from phalanx.errors import (
        CollectiveMismatchError,
        CollectiveTimeoutError,
        ConfigurationError,
        DisagreementError,
        MembershipChangedError,
        PeerLostError,
        PhalanxError,
        RendezvousError,
        UnsupportedError,
    )
    from phalanx.evaluator import SidecarEvaluator
    from phalanx.launcher.launch_function import launch
    from phalanx.parameter_server.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
    from phalanx.strategies import (
        CentralStorageStrategy,
        DiLoCoStrategy,
        LocalSGDStrategy,
        MirroredStrategy,
        ModelParallelStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        ParameterServerStrategy,
        ReplicaContext,
        RunOptions,
        Server,
        ShardedStrategy,
        Strategy,
        TPUStrategy,
        ValueContext,
        experimental_set_strategy,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
        leave_job,
    )
    from phalanx.strategies.loss_scaling import compute_average_loss, scale_regularization_loss
    from phalanx.supervisor import ManagedSession, Saver, Supervisor
    from phalanx.training.steps.outer_optimizer import OuterSGD

# The public names of each module, imported on first use.
_EXPORTS = {
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
        "ShardedStrategy Strategy TPUStrategy ValueContext experimental_set_strategy get_replica_context get_strategy "
        "has_strategy in_cross_replica_context leave_job"
    ),
    "phalanx.parameter_server.partitioners": "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner",
    "phalanx.evaluator": "SidecarEvaluator",
    "phalanx.supervisor": "ManagedSession Saver Supervisor",
    "phalanx.training.steps.outer_optimizer": "OuterSGD",
    "phalanx.strategies.loss_scaling": "compute_average_loss scale_regularization_loss",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = [
    "__version__",
    "callbacks",
    "cluster_resolver",
    "compression",
    "config",
    "coordinator",
    "data",
    "elastic",
    "errors",
    "experimental",
    "losses",
    "tpu",
    "tuning",
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "ClusterSpec",
    "CollectiveCommunication",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ConfigurationError",
    "DatasetCreator",
    "DiLoCoStrategy",
    "DisagreementError",
    "DistributedDataset",
    "DistributedIterator",
    "FixedShardsPartitioner",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "KubernetesClusterResolver",
    "LocalSGDStrategy",
    "MPIClusterResolver",
    "ManagedSession",
    "MaxSizePartitioner",
    "MembershipChangedError",
    "MinSizePartitioner",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "OuterSGD",
    "ParameterServerStrategy",
    "PeerLostError",
    "PhalanxError",
    "ReduceOp",
    "ReductionToOneDevice",
    "RendezvousError",
    "ReplicaContext",
    "RunOptions",
    "Saver",
    "Server",
    "ShardedCheckpoint",
    "ShardedStrategy",
    "SidecarEvaluator",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "Strategy",
    "Supervisor",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TPUStrategy",
    "Task",
    "UnsupportedError",
    "ValueContext",
    "compute_average_loss",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "leave_job",
    "resolve",
    "scale_regularization_loss",
]

_MODULES = {*__all__} - {*_MODULE_OF, "__version__"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF and name not in _MODULES:
        raise missing_attribute(__name__, name)
    # Before the first strategy, so that an error in its arguments ends the process with the exit code of that error.
    importlib.import_module("phalanx.runtime.process_exit").install()
    if name in _MODULES:
        return importlib.import_module(f"phalanx.{name}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
