"""Input of each rank: every input that Keras takes, cut into local batches."""

from phalanx.data.batch_split import LocalBatch, local_range
from phalanx.data.dataset_creator import DatasetCreator
from phalanx.data.distributed_dataset import (
    DistributedDataset,
    DistributedIterator,
    distribute_dataset,
    distribute_from_function,
)
from phalanx.data.sample_ledger import ledger
from phalanx.data.sharded_input import ShardedInput, shard_input
from phalanx.data.sharding_policy import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from phalanx.data.source_registry import accepts_batch_size

__all__ = [
    "AutoShardPolicy",
    "DatasetCreator",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "LocalBatch",
    "ShardedInput",
    "accepts_batch_size",
    "distribute_dataset",
    "distribute_from_function",
    "ledger",
    "local_range",
    "shard_input",
]
