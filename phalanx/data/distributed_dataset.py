"""Distributed datasets for custom training loops, from a dataset or from a function that creates each rank's."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.data import source_registry
from phalanx.data.batch_split import LocalBatch, make_placeholder
from phalanx.data.input_request import InputRequest
from phalanx.data.sharded_input import ShardedInput
from phalanx.data.sharding_policy import AutoShardPolicy, InputContext
from phalanx.data.source import Source
from phalanx.errors import ConfigurationError, UnsupportedError

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


def make_per_rank_source(source: Source) -> Source:
    """Return a copy of a source whose elements all belong to this rank, as its input function created them."""
    own = copy.copy(source)  # the function may have returned a distributed dataset, whose source must not change
    kind = source.traits.kind
    own.traits = replace(
        source.traits,
        signature="a dataset of each rank's own",
        reason="distribute_datasets_from_function: each replica reads what its function returned",
        policy=AutoShardPolicy.OFF,
        is_uniform=False,
        is_compared=False,
        is_read_by_all_ranks=False,
        draws_as_keras=False,
        is_in_memory=False,
        describe_share=lambda *_: f"reads all of the {kind} that its own function returned",
    )
    return own


class Members(NamedTuple):
    """The members of an elastic job, over which data is divided.

    Attributes:
        rank_and_size: Function that returns the current rank and world size.
        from_chief: Function that takes this rank's number and returns the chief's; every rank must call it.
    """

    rank_and_size: Callable[[], tuple[int, int]]
    from_chief: Callable[[int], int]


class DistributedDataset:
    """This rank's local batches of a dataset, for a custom training loop or for `model.fit`.

    Each iteration is an epoch. Elements keep the structure of the dataset. If a batch has no sample for a rank, that
    rank gets arrays of length 0, as in `tf.distribute`, so a loss must be a sum over samples divided by the global
    batch size, not a local mean. A rank whose own data (files, a per-rank pipeline) ends before that of the others
    gets empty arrays too: all ranks must iterate such a dataset and take equally many steps.

    Args:
        source: The source of this rank.
        original: The program's dataset from which the source was created, for methods of Keras.
        distribution: Division of the dataset among the ranks.
        element_spec: The element_spec of a tf.data.Dataset, with the batch dimension open; None for other datasets.
    """

    def __init__(
        self, source: Source, original: Any, distribution: DatasetDistribution, element_spec: Any = None
    ) -> None:
        self.source = source
        self.original = original
        rank, world_size = self._part = distribution.rank, distribution.world_size
        self._members = distribution.members
        # Ranks that read the same batches reach the end at the same step, without communication.
        self._any_rank = None if source.traits.policy is AutoShardPolicy.DATA else distribution.any_rank
        self.element_spec = element_spec
        self._convert = distribution.convert
        self._sharded = ShardedInput(source, InputRequest(None, rank=rank, world_size=world_size))
        self._epochs = 0

    def __iter__(self) -> DistributedIterator:
        check_not_in_tf_function()
        return DistributedIterator(map(self._converted, self._begin()), self.element_spec)

    def _begin(self) -> Iterator[Any]:
        """Start the next epoch, and return its elements, of NumPy arrays."""
        members = self._members
        if members is not None:
            self._epochs = members.from_chief(self._epochs)  # a member that joins has iterated less often
            self._part = members.rank_and_size()
            self._sharded.reshard(*self._part)
        epoch = self._epochs
        self._epochs += 1
        shares = self._sharded.shares(epoch)
        if members is not None:
            shares = _of_one_generation(shares, members, self._part)
        alone = self._any_rank is None or self._part[1] == 1
        return map(_arrays, shares if alone else self._until_all_end(shares))

    def _converted(self, element: Any) -> Any:
        return element if self._convert is None else map_leaves(self._convert, element)

    def _until_all_end(self, shares: Iterator[LocalBatch]) -> Iterator[LocalBatch]:
        """Yield equally many shares on every rank: a rank whose data ends first gets shares of size 0 until all end."""
        assert self._any_rank is not None
        last: LocalBatch | None = None
        while True:
            # A collective before each element, in which ranks without data also take part.
            share = next(shares, None)
            if not self._any_rank(share is not None):
                return
            last = share or (last or self._example())._replace(size=0)
            yield last

    def _example(self) -> LocalBatch:
        """A share with the structure of those of the other ranks, for a rank without any data."""
        try:
            return self.source.peek()
        except StopIteration:
            pass
        specs = leaves(self.element_spec)
        if not specs or any(getattr(getattr(spec, "shape", None), "rank", None) is None for spec in specs):
            raise ConfigurationError(
                f"The {self.source.traits.kind} of rank {self._part[0]} has no batch at all, and the others have some. "
                f"Give each replica at least one batch: divide the data before `.batch()`, not after it."
            )

        def one(spec: Any) -> Any:
            kind = "S1" if spec.dtype.name == "string" else spec.dtype.as_numpy_dtype
            return np.zeros([1, *(length or 0 for length in spec.shape[1:])], kind)

        return LocalBatch(map_leaves(one, self.element_spec), 0, None, None)

    def __len__(self) -> int:
        """Number of batches per epoch. Raises: TypeError if unknown."""
        length = self.source.num_batches
        if length is None:
            raise TypeError(f"The length of this {self.source.traits.kind} is unknown.")
        return length

    @property
    def cardinality(self) -> int:
        """Number of batches per epoch; -1 (`tf.data.INFINITE_CARDINALITY`) for endless data, -2
        (`tf.data.UNKNOWN_CARDINALITY`) if unknown."""
        if self.source.traits.is_endless:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if self.source.num_batches is None else self.source.num_batches

    def explain(self) -> str:
        """Explain what each rank reads, and why."""
        return self._sharded.description.explain()


def _of_one_generation(shares: Iterator[LocalBatch], members: Members, began: tuple[int, int]) -> Iterator[LocalBatch]:
    """Yield the shares while this rank's part of each batch is still the one with which the iteration began."""
    for share in shares:
        if members.rank_and_size() != began:
            raise UnsupportedError(
                "The members of the job have changed since this iterator of a distributed dataset began, and it still "
                "divides batches among the former ones. Begin it inside the function of phalanx.elastic.run, which is "
                "called again after each change: `for batch in dataset`."
            )
        yield share


def _arrays(share: LocalBatch) -> Any:
    return share.data if share.size else map_leaves(lambda array: array[:0], make_placeholder(share.data))


class DistributedIterator:
    """One epoch of a `DistributedDataset` (`tf.distribute.DistributedIterator`).

    Attributes:
        element_spec: The element_spec of the dataset.
    """

    def __init__(self, elements: Iterator[Any], element_spec: Any = None) -> None:
        self._elements = elements
        self.element_spec = element_spec

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        check_not_in_tf_function()
        return next(self._elements)

    def get_next(self) -> Any:
        """Return the next element. Raises: StopIteration at the end."""
        return next(self)

    def get_next_as_optional(self) -> Any:
        """Return the next element as a `tf.experimental.Optional`, empty at the end; only for datasets of tf.data.

        Raises: UnsupportedError for other datasets.
        """
        if self.element_spec is None:
            raise UnsupportedError("get_next_as_optional() is for tf.data.Dataset. Use `for batch in dataset` instead.")
        optional = sys.modules["tensorflow"].experimental.Optional
        try:
            return optional.from_value(next(self))
        except StopIteration:
            return optional.empty(self.element_spec)


def check_not_in_tf_function() -> None:
    """Raise UnsupportedError inside a `tf.function`, where a batch would become a constant."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.inside_function():
        raise UnsupportedError(
            "A distributed dataset was created inside a tf.function, or iterated there while Keras does not run on "
            "TensorFlow: the function would see one batch forever. Create it outside, and pass it, its iterator or "
            "each batch to the tf.function. (What a ClusterCoordinator's dataset function returns may be a "
            "tf.data.Dataset itself, which a tf.function can iterate.)"
        )


@dataclass(frozen=True, kw_only=True)
class DatasetDistribution:
    """Division of datasets among the ranks of a strategy, as seen by one of them.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        seed: Seed, equal on all ranks.
        convert: Function that converts a NumPy array to a tensor of the backend; None to keep the arrays.
        any_rank: Function that returns whether its argument is true on at least one rank; every rank must call it.
        members: The members of an elastic job; None in a job of fixed size.
        kind: The class of the datasets that the program gets.
    """

    rank: int
    world_size: int
    seed: int
    convert: Callable[[Any], Any] | None = None
    any_rank: Callable[[bool], bool] | None = None
    members: Members | None = None
    kind: type[DistributedDataset] = DistributedDataset


def distribute_dataset(dataset: Any, distribution: DatasetDistribution) -> DistributedDataset:
    """`strategy.experimental_distribute_dataset`: the dataset's batch is the global batch, and each rank gets its part.
    Takes any dataset that `fit` takes.

    Raises: ConfigurationError for a list or a tuple.
    """
    if isinstance(dataset, DistributedDataset):
        return dataset
    check_not_in_tf_function()
    _check_dataset(dataset)
    request = InputRequest(
        dataset,
        rank=distribution.rank,
        world_size=distribution.world_size,
        seed=distribution.seed,
        replayed=0,
        opens_as_keras=False,
    )
    source = source_registry.make_source(request)
    return distribution.kind(source, dataset, distribution, _element_spec(dataset))


def distribute_from_function(
    function: Callable[[InputContext], Any], distribution: DatasetDistribution
) -> DistributedDataset:
    """`strategy.distribute_datasets_from_function`: `function(InputContext)` returns this rank's dataset, batched with
    the local batch size. It is neither cut nor compared with those of other ranks."""
    check_not_in_tf_function()
    rank, world_size = distribution.rank, distribution.world_size
    dataset = function(InputContext(world_size, rank, world_size))
    _check_dataset(dataset)
    request = InputRequest(dataset, seed=distribution.seed + rank, replayed=0, opens_as_keras=False)
    source = make_per_rank_source(source_registry.make_source(request))
    return distribution.kind(source, dataset, distribution, _element_spec(dataset))


def _check_dataset(dataset: Any) -> None:
    # `fit` takes a list for the arrays of several inputs, and would stack them.
    if isinstance(dataset, list | tuple):
        raise ConfigurationError(
            f"A {type(dataset).__name__} of arrays or batches cannot be distributed. Pass a tf.data.Dataset, a "
            f"PyDataset, a DataLoader, or, for one pass, a generator that yields batches."
        )


def _element_spec(dataset: Any) -> Any:
    """The element_spec of a tf.data.Dataset with the batch dimension open: shares may differ in size."""
    spec = getattr(dataset, "element_spec", None)
    if spec is None or isinstance(dataset, DistributedDataset):
        return spec

    def opened(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", None)
        if shape is None or shape.rank is None or type(leaf).__name__ != "TensorSpec":
            return leaf
        return type(leaf)([None, *shape[1:]], leaf.dtype, leaf.name)

    return map_leaves(opened, spec)


def make_source(request: InputRequest) -> Source:
    """The source of a distributed dataset that is passed to `fit`."""
    source: Source = request.x.source
    return source
