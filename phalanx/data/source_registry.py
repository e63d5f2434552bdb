"""`shard_input`: the kind of an input, and from it the source that reads it for one rank."""

from __future__ import annotations

import types
from typing import Any

from phalanx.data.array_source import ArraySource
from phalanx.data.sharded_input import ShardedInput
from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.data.shuffling import Shuffling
from phalanx.data.source import Source
from phalanx.errors import ConfigurationError

ACCEPTED = (
    "NumPy arrays, tensors of JAX, TensorFlow or PyTorch, pandas objects (alone or in lists, tuples and "
    "dicts), keras.utils.PyDataset, tf.data.Dataset, torch.utils.data.DataLoader, grain datasets, Python "
    "generators, and the datasets of strategy.experimental_distribute_dataset and "
    "distribute_datasets_from_function"
)


def shard_input(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    shuffle: bool | str = False,
    class_weight: dict[int, float] | None = None,
    rank: int,
    world_size: int,
    seed: int,
    shuffling: Shuffling | None = None,
    policy: AutoShardPolicy | None = None,
    in_order: bool = False,
) -> ShardedInput:
    """What one rank reads of an input of `fit`, `evaluate` or `predict`; arguments mean what they do there.

    `batch_size`, or the dataset's own batch, is the global batch: over all ranks together.

    Args:
        shuffle: for arrays and PyDatasets, as in Keras. Ignored for datasets that shuffle themselves.
        seed: equal on all ranks.
        shuffling: for arrays, PyDatasets and map-style DataLoaders: how the orders of the passes are agreed on. None:
            they depend on `seed` and the epoch alone, and so are the same on all ranks.
        policy: for tf.data.Dataset; None: the one in the dataset's options, AUTO if there is none.
        in_order: AUTO keeps the order of one process, where it could deal out files.

    Raises: TypeError for an input that is not accepted; ConfigurationError (a ValueError) for arguments that
        do not fit the input. On wrong arguments every rank raises, because every rank sees the same.
    """
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank must be 0 to world_size - 1; got rank {rank} of {world_size}.")
    if class_weight is not None and sample_weight is not None:
        raise ConfigurationError("You cannot `class_weight` and `sample_weight` at the same time.")
    source = make_source(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        shuffle=shuffle,
        class_weight=class_weight,
        rank=rank,
        world_size=world_size,
        seed=seed,
        shuffling=shuffling,
        policy=None if policy is None else AutoShardPolicy.of(policy),
        in_order=in_order,
    )
    if source.endless and steps_per_epoch is None:
        raise ConfigurationError(
            f"The {source.kind} never ends. When passing an infinitely repeating dataset, you must specify "
            "the `steps_per_epoch` argument (`steps` in evaluate and predict)."
        )
    return ShardedInput(
        source,
        rank=rank,
        world_size=world_size,
        steps_per_epoch=steps_per_epoch,
        as_keras=shuffling is not None,
    )


def accepts_batch_size(x: Any) -> bool:
    """Whether `batch_size` applies to this input: to arrays it does, a dataset brings its own batches."""
    return dataset_kind(x) is None


def dataset_kind(x: Any) -> str | None:
    """The name of a dataset's kind; None for arrays and whatever else is no dataset.

    By the names of its classes, as Keras does it, so that no framework is imported only to be asked.
    """
    if isinstance(x, types.GeneratorType):
        return "generator"
    for cls in type(x).__mro__:
        name, module = cls.__name__, cls.__module__
        if name == "PyDataset" and module.startswith("keras."):
            return "PyDataset"
        if name == "DatasetV2" and module.startswith("tensorflow."):
            return "tf.data.Dataset"
        if name == "DataLoader" and module.startswith("torch.utils.data"):
            return "torch DataLoader"
        if name in ("MapDataset", "IterDataset", "DataLoader") and module.startswith("grain"):
            return "grain.Dataset and grain.DataLoader"
        if name == "DistributedDataset" and module.startswith("phalanx."):
            return "DistributedDataset"
    return None


def make_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    shuffle: bool | str = False,
    class_weight: dict[int, float] | None = None,
    rank: int,
    world_size: int,
    seed: int,
    shuffling: Shuffling | None = None,
    policy: AutoShardPolicy | None = None,
    in_order: bool = False,
) -> Source:
    """The source for one rank of an input; arguments and errors as for `shard_input`."""
    kind = dataset_kind(x)
    if kind != "tf.data.Dataset" and policy not in (None, AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        raise ConfigurationError(
            f"AutoShardPolicy.{policy.name} applies to tf.data.Dataset only, got {_name(x)}. All other "
            "inputs are divided by DATA. For data that each replica reads for itself, use "
            "`strategy.distribute_datasets_from_function`."
        )
    if kind is None:
        from phalanx.keras_compat import data_adapters

        if x is None or not data_adapters.is_arrays(x, y, sample_weight):
            raise TypeError(f"The input x is {_name(x)}. Accepted are {ACCEPTED}.{_advice(x, y, sample_weight)}")
        return ArraySource(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffling=shuffling,
        )
    _check_dataset_arguments(kind, y=y, sample_weight=sample_weight, batch_size=batch_size)
    if kind == "PyDataset":
        from phalanx.data.pydataset_source import PyDatasetSource

        return PyDatasetSource(
            x,
            shuffle=shuffle,
            class_weight=class_weight,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffling=shuffling,
        )
    if kind == "tf.data.Dataset":
        from phalanx.data.tf_data_source import tf_source

        return tf_source(
            x,
            policy=policy,
            in_order=in_order,
            class_weight=class_weight,
            whole_passes=steps_per_epoch is None,
            rank=rank,
            world_size=world_size,
            seed=seed,
        )
    if class_weight is not None:
        raise ConfigurationError(
            f"Argument `class_weight` is not supported for {kind} inputs. Let the batches be "
            f"(x, y, sample_weight) instead. Received: class_weight={class_weight}"
        )
    if kind == "generator":
        from phalanx.data.generator_source import generator_source

        return generator_source(x, rank=rank, world_size=world_size)
    if kind == "torch DataLoader":
        from phalanx.data.dataloader_source import dataloader_source

        return dataloader_source(
            x,
            whole_passes=steps_per_epoch is None,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffling=shuffling,
        )
    if kind == "DistributedDataset":
        return x.source  # type: ignore[no-any-return]
    from phalanx.data.grain_source import grain_source

    return grain_source(x, rank=rank, world_size=world_size)


def _check_dataset_arguments(kind: str, *, y: Any, sample_weight: Any, batch_size: int | None) -> None:
    for name, meaning, value in (
        ("y", "the targets", y),
        ("sample_weight", "the sample weights", sample_weight),
        ("batch_size", "the batches", batch_size),
    ):
        if value is not None:
            raise ConfigurationError(
                f"When providing `x` as a {kind}, `{name}` should not be passed. Instead, {meaning} should "
                f"be included as part of the {kind}."
                + (" Its batch is the global batch, over all replicas." if name == "batch_size" else "")
            )


def _name(x: Any) -> str:
    cls = type(x)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _advice(x: Any, y: Any, sample_weight: Any) -> str:
    if hasattr(x, "__next__"):
        return " An iterator that is no generator can be wrapped in one: `(batch for batch in iterator)`."
    if isinstance(x, (list, tuple)) and x and isinstance(x[0], (int, float, list)):
        return " Convert lists of numbers with `numpy.array(x)`: a list means several inputs."
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None and not hasattr(value, "__array__"):
            return f" Or `{name}` is not an array: it is {_name(value)}."
    return ""
