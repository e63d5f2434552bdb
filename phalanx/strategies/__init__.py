"""The strategies: which processes and devices are the replicas of a job."""

from __future__ import annotations

from functools import cache

from phalanx.keras_compat.global_batch.step_collectives import SINGLE_RANK
from phalanx.strategies import replica_context
from phalanx.strategies.central_storage_strategy import CentralStorageStrategy
from phalanx.strategies.cluster_server import Server
from phalanx.strategies.current_job import leave_job
from phalanx.strategies.local_sgd_strategy import DiLoCoStrategy, LocalSGDStrategy
from phalanx.strategies.mirrored_strategy import MirroredStrategy
from phalanx.strategies.model_parallel_strategy import ModelParallelStrategy
from phalanx.strategies.multi_worker_strategy import MultiWorkerMirroredStrategy
from phalanx.strategies.one_device_strategy import DefaultStrategy, OneDeviceStrategy
from phalanx.strategies.parameter_server_strategy import ParameterServerStrategy
from phalanx.strategies.replica_context import (
    ReplicaContext,
    StepContext,
    current_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from phalanx.strategies.run_options import RunOptions
from phalanx.strategies.set_strategy import experimental_set_strategy
from phalanx.strategies.sharded_strategy import ShardedStrategy
from phalanx.strategies.strategy import Strategy, ValueContext
from phalanx.strategies.strategy_extended import StrategyExtended
from phalanx.strategies.tpu_strategy import TPUStrategy


@cache
def _default() -> Strategy:
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """The strategy whose scope the caller is in; outside any scope, one with a single replica."""
    return replica_context.current_strategy() or _default()


def get_replica_context() -> ReplicaContext | None:
    """The context through which code inside `strategy.run`, `fit` and `evaluate` reaches the other replicas; None
    inside a scope but outside these, as in `tf.distribute`."""
    if in_cross_replica_context():
        return None
    return current_replica_context() or StepContext(_default(), SINGLE_RANK)


__all__ = [
    "CentralStorageStrategy",
    "DefaultStrategy",
    "DiLoCoStrategy",
    "LocalSGDStrategy",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "ShardedStrategy",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "ValueContext",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "leave_job",
]
