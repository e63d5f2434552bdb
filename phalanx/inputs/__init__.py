"""What each rank reads: every input that Keras takes, cut into local batches."""

from phalanx.inputs.batch import LocalBatch
from phalanx.inputs.distributed import (
    DistributedDataset,
    DistributedIterator,
    distribute_dataset,
    distribute_from_function,
)
from phalanx.inputs.policy import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from phalanx.inputs.shard import accepts_batch_size, shard_input
from phalanx.inputs.sharded import ShardedInput
from phalanx.inputs.split import local_range

__all__ = [
    "AutoShardPolicy",
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
    "local_range",
    "shard_input",
]
