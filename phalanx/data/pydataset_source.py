"""`keras.utils.PyDataset`: its `__getitem__` returns whole global batches, so every rank reads each and keeps its part.
Workers cut the batch before they return it, so only the part is sent between processes."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from phalanx.arrays.tree import map_leaves
from phalanx.data.batch_split import LocalBatch, split_share
from phalanx.data.dataset_elements import Array, to_numpy
from phalanx.data.input_request import TWO_WEIGHTS, InputRequest
from phalanx.data.source import Source, SourceTraits
from phalanx.errors import ConfigurationError
from phalanx.keras_compat import data_adapters

_KIND = "PyDataset"


class _CapturedError:
    """An exception of `__getitem__`, returned as a value: raised in a worker, it would leave Keras's pool only partly
    stopped."""

    def __init__(self, error: Exception, across_processes: bool):
        self.error: Any = ExceptionWithTraceback(error, error.__traceback__) if across_processes else error


class _Reader:
    """The batches at given positions of a PyDataset, standardized and cut for one rank.

    Replaces the PyDataset in Keras's pool, which requests 0, 1, 2, ...
    """

    def __init__(
        self,
        dataset: Any,
        positions: Sequence[int] | Array,
        rank: int,
        world_size: int,
        class_weight: dict[int, float] | None,
        across_processes: bool,
    ):
        self._dataset = dataset
        self._positions = positions
        self._rank = rank
        self._world_size = world_size
        self._class_weight = class_weight
        self._across_processes = across_processes

    @property
    def num_batches(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> LocalBatch | _CapturedError:
        try:
            return self.share(index)
        except Exception as error:
            return _CapturedError(error, self._across_processes)

    def share(self, index: int) -> LocalBatch:
        batch = standardize(self._dataset[int(self._positions[index])], self._class_weight)
        return split_share(map_leaves(to_numpy, batch), self._rank, self._world_size, _KIND, copies=True)


def standardize(batch: Any, class_weight: dict[int, float] | None) -> Any:
    """Convert a batch to the form of Keras's PyDatasetAdapter: a dict, or a tuple of one to three items.

    Raises: ValueError with Keras's message.
    """
    if isinstance(batch, dict):
        return batch
    if isinstance(batch, list):
        batch = tuple(batch)
    elif not isinstance(batch, tuple):
        batch = (batch,)
    if len(batch) not in (1, 2, 3):
        raise ConfigurationError(
            "PyDataset.__getitem__() must return a tuple or a dict. If a tuple, it must be ordered either "
            "(input,) or (inputs, targets) or (inputs, targets, sample_weights). "
            f"Received a tuple of {len(batch)} items."
        )
    if class_weight is not None:
        if len(batch) == 3 and batch[2] is not None:
            raise ConfigurationError(TWO_WEIGHTS)
        if len(batch) >= 2:
            batch = (batch[0], batch[1], data_adapters.class_weights(batch[1], class_weight))
    return batch


class PyDatasetSource(Source):
    """A PyDataset of known or unknown length.

    `workers`, `use_multiprocessing` and `max_queue_size` work as in Keras. With `shuffle`, each pass reads batches in
    the chief's order, which it draws as Keras does; without a `shuffling`, the order follows from `seed` and the pass.
    """

    def __init__(self, request: InputRequest):
        super().__init__(request)
        self._dataset = dataset = request.x
        self._request = request
        self._knows_shapes = not data_adapters.loaders_are_read_by_tf_data()
        self._is_pooled = dataset.workers > 1 or (dataset.workers > 0 and dataset.use_multiprocessing)
        length = self.num_batches
        if length == 0:
            raise ConfigurationError("The PyDataset has length 0. Expected at least one batch.")
        self.traits = SourceTraits(
            _KIND,
            signature=f"PyDataset of {length} batches, shuffle={request.shuffle}",
            reason="a PyDataset makes whole batches, so every replica makes each and keeps its part",
            is_uniform=length is not None,
            is_endless=length is None,
            is_random_access=length is not None and not self._is_pooled,
        )

    @property
    def num_batches(self) -> int | None:  # type: ignore[override]
        # Read each time, because `on_epoch_end` may change it.
        length = self._dataset.num_batches
        return None if length is None else int(length)

    def read(self, key: int, start: int, stop: int | None) -> Iterator[LocalBatch]:
        self._read_shape_batches(0)
        positions: Sequence[int] | Array
        if self.num_batches is None:
            positions = range(start, sys.maxsize if stop is None else stop)
        elif self._request.shuffle:
            positions = self.order.get(key, self._new_order)[start:stop]
        else:
            positions = range(self.num_batches)[start:stop]
        reader = self._reader(positions)
        return self._pool(reader, len(positions)) if self._is_pooled else map(reader.share, range(len(positions)))

    def _reader(self, positions: Sequence[int] | Array) -> _Reader:
        across_processes = self._is_pooled and self._dataset.use_multiprocessing
        class_weight = self._request.class_weight
        return _Reader(self._dataset, positions, self._rank, self._world_size, class_weight, across_processes)

    def _pool(self, reader: _Reader, count: int) -> Iterator[LocalBatch]:
        dataset = self._dataset
        enqueuer = data_adapters.ordered_enqueuer(
            reader, dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size
        )
        enqueuer.start()
        thread = enqueuer.run_thread
        done = 0
        try:
            for item in itertools.islice(enqueuer.get(), count):
                if isinstance(item, _CapturedError):
                    raise item.error
                done += 1
                yield item
        finally:
            # Draining waits; if everything has been taken, the pool ends by itself.
            enqueuer.stop(drain_queue_and_join=done < count)
            thread.join()

    def _new_order(self, key: int) -> Array:
        count = self.num_batches
        assert count is not None
        shuffling = self._request.shuffling
        if shuffling is None:
            return np.random.default_rng([self._request.seed, key]).permutation(count)
        # Every process draws, so that a seeded program's next random numbers are equal on all.
        return shuffling.from_chief(_shuffled(count))

    def peek(self, *, restart: bool = False) -> LocalBatch:
        request, count = self._request, self.num_batches
        if restart and request.shuffle and request.shuffling is not None and count is not None:
            _shuffled(count)  # before building the model, which may draw from the same generator
        share = self._reader([0]).share(0)
        self._read_shape_batches(1)
        return share

    def _read_shape_batches(self, start: int) -> None:
        """Read the batches that Keras on TensorFlow reads first, once: a dataset may draw random numbers for each
        batch.

        Args:
            start: The first batch that has not been read.
        """
        if not self._knows_shapes:
            self._knows_shapes = True
            count = data_adapters.NUM_BATCHES_FOR_SHAPES
            for index in range(start, count if self.num_batches is None else min(count, self.num_batches)):
                _ = self._dataset[index]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


make_source = PyDatasetSource


def _shuffled(count: int) -> Array:
    """The numbers below `count`, shuffled as Keras shuffles the batches of a PyDataset."""
    numbers = list(range(count))
    random.shuffle(numbers)
    return np.array(numbers, np.int64)
