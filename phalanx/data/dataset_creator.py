"""`DatasetCreator`: a function, passed to `fit`, that creates each replica's dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.data import source_registry
from phalanx.data.distributed_dataset import make_per_rank_source
from phalanx.data.input_request import InputRequest
from phalanx.data.sharding_policy import InputContext, InputOptions
from phalanx.data.source import Source
from phalanx.errors import ConfigurationError


class DatasetCreator:
    """Data for `fit`, `evaluate` and `predict`, created by a function (`tf.keras.utils.experimental.DatasetCreator`).

        def dataset_fn(input_context):
            batch_size = input_context.get_per_replica_batch_size(64)
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
            dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
            return dataset.batch(batch_size)

        model.fit(phalanx.DatasetCreator(dataset_fn), epochs=3, steps_per_epoch=20)

    Each replica reads the dataset that its own call returns, in batches of its share of the global batch, as with
    `strategy.distribute_datasets_from_function`. With parameter servers, every worker creates the whole dataset, and
    the servers assign its batches to workers, so that no batch is used twice. In a single process, the context
    describes one pipeline.

    Args:
        dataset_fn: Function of an `InputContext` that returns a `tf.data.Dataset`, or any dataset that `fit` takes.
        input_options: Ignored; accepted for compatibility with TensorFlow.

    Raises: ConfigurationError if an argument has another type.
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], input_options: InputOptions | None = None) -> None:
        if not callable(dataset_fn):
            raise ConfigurationError(
                f"dataset_fn is {dataset_fn!r}; pass a function that takes an InputContext and returns a dataset."
            )
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    def __call__(self, input_context: InputContext | None = None) -> Any:
        """Create the dataset of one pipeline, by default of the only one."""
        return self.dataset_fn(InputContext() if input_context is None else input_context)


def make_source(request: InputRequest) -> Source:
    """Create the source of this rank's dataset, which is neither cut nor compared with those of other ranks."""
    rank, world_size = request.rank, request.world_size
    dataset = request.x(InputContext(world_size, rank, world_size))
    if source_registry.find_kind(dataset) is None:
        raise ConfigurationError(
            f"The dataset_fn of the DatasetCreator returned a {type(dataset).__name__}. Return a tf.data.Dataset, a "
            f"DataLoader, a PyDataset, or another dataset that has batches."
        )
    own = source_registry.make_source(InputRequest(dataset, seed=request.seed + rank, replayed=0))
    return own if world_size == 1 else make_per_rank_source(own)
