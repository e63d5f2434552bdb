"""Policies that divide a dataset among ranks, and the context that an input function receives."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phalanx.errors import ConfigurationError


class AutoShardPolicy(enum.IntEnum):
    """The part of a `tf.data.Dataset` that each rank reads. Names and values match `tf.data.experimental`.

    Every other kind of input is divided by DATA.

    OFF: every rank reads the whole dataset, in batches of its share of the global batch. An epoch then uses each sample
        `world_size` times. For datasets that the program itself divides.
    AUTO: DATA. (In `tf.distribute`: FILE if the dataset reads files, else DATA.)
    FILE: file i goes to rank i modulo world_size. Each rank reads only its own files; the global batches then differ
        from those of one replica.
    DATA: every rank reads the dataset and takes its part of each global batch: each step uses the same samples as with
        one replica. (`tf.distribute` gives each replica whole elements instead.)
    HINT: the dataset's `shard(tf.data.experimental.SHARD_HINT, ...)` becomes `shard(world_size, rank)`.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@dataclass(frozen=True, slots=True)
class InputContext:
    """Argument of an input function: its part of the data (`tf.distribute.InputContext`).

    Attributes:
        num_input_pipelines: The number of input pipelines in the job: one for each replica.
        input_pipeline_id: The number of this pipeline, 0 to num_input_pipelines - 1.
        num_replicas_in_sync: The number of replicas that share one global batch.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The batch size of this pipeline.

        Raises: ValueError if `global_batch_size` is not divisible by `num_replicas_in_sync`.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ConfigurationError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by `num_replicas_in_sync` "
                f"{self.num_replicas_in_sync!r}. Choose a multiple, or pass the dataset itself to fit or "
                "experimental_distribute_dataset: uneven shares are allowed there."
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return f"InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"


class InputReplicationMode(enum.Enum):
    """`tf.distribute.InputReplicationMode`. A replica is a process here, so both values mean the same."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True, slots=True)
class InputOptions:
    """The options of `tf.distribute.InputOptions`, accepted so that programs that pass them run unchanged.

    They have no effect: they choose among devices of one process, and the number of prefetched batches. In Phalanx,
    each replica prepares its batches in host memory when they are needed; `dataset.prefetch` prepares batches of
    tf.data in advance.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
