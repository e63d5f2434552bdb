"""One rank's view of the data of a `fit`, `evaluate` or `predict`: epochs of local batches."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from phalanx.data.batch_split import LocalBatch, make_placeholder
from phalanx.data.dataset_elements import Array, ElementStructure, unpack
from phalanx.data.input_description import InputDescription
from phalanx.data.input_position import InputPosition
from phalanx.data.input_request import InputRequest
from phalanx.data.rank_local_reads import reading_rank_local_data
from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.data.source import Source
from phalanx.data.source_registry import make_source
from phalanx.errors import ConfigurationError


def shard_input(request: InputRequest) -> ShardedInput:
    """Create one rank's view of an input.

    Raises:
        TypeError: Phalanx cannot read inputs of this type.
        ConfigurationError: arguments do not fit the input. All ranks raise it, because all see the same arguments.
    """
    source = make_source(request)
    if source.traits.is_endless and request.steps_per_epoch is None:
        raise ConfigurationError(
            f"The {source.traits.kind} never ends. When passing an infinitely repeating dataset, you must specify "
            "the `steps_per_epoch` argument (`steps` in evaluate and predict)."
        )
    return ShardedInput(source, request)


class ShardedInput:
    """The local batches of one rank, epoch by epoch; created by `shard_input`.

    Not thread-safe. Epochs are read one after another: an epoch's iterator must be exhausted or closed before the next
    one starts.

    Args:
        source: The source of this rank.
        request: The request for which the source was created. If its ranks agree on orders (`shuffling`), opening a
            pass draws the random numbers of the program that Keras itself would draw.

    Attributes:
        source: The source of this rank.
        position: The position of the running epoch and the next one in the data.
        description: The description of the input for messages.
        structure: The structure of the dataset's elements that have been read.
        keras_structure: The structure in which Keras takes them, if it differs.
        may_be_empty: Whether data without any batch is allowed, as for validation data of Keras's `fit`.
    """

    def __init__(self, source: Source, request: InputRequest):
        self._steps = steps = request.steps_per_epoch
        if steps is not None and steps < 1:
            raise ConfigurationError(f"steps_per_epoch must be at least 1; got {steps}.")
        self.source = source
        draws = request.shuffling is not None and not source.traits.draws_as_keras
        self.position = InputPosition(source, steps, group=request.steps_per_execution, draws=draws)
        self.description = InputDescription(source, steps, request.world_size)
        self.structure = ElementStructure.PARTS
        self.keras_structure: ElementStructure | None = None
        self.may_be_empty = False
        self._is_divided = source.traits.policy is AutoShardPolicy.DATA  # else each rank reads its own data
        self._rank, self._world_size = request.rank, request.world_size
        self._last: LocalBatch | None = None  # the batch read last; still None after an epoch if the data has no batch

    # Properties of the data.

    @property
    def is_in_memory(self) -> bool:
        """See `SourceTraits`."""
        return self.source.traits.is_in_memory

    @property
    def num_batches(self) -> int | None:
        """Number of batches per epoch, as a progress bar shows it; None if unknown. The first pass over data of unknown
        length counts them (except for per-rank pipelines, which may differ)."""
        if self._steps is not None:
            return self._steps
        return self.position.counted_batches if self.source.num_batches is None else self.source.num_batches

    @property
    def is_uniform(self) -> bool:
        """Whether every rank is known to see equally many batches of the same global sizes. Then the ranks need not
        agree on the end of the data."""
        return self.source.traits.is_uniform

    @property
    def sampled_values(self) -> Array:
        """Numbers sampled from the data, by which ranks compare their inputs; empty for data that cannot be
        inspected."""
        return self.source.sampled_values if self._is_divided else np.zeros(0)

    @property
    def samples(self) -> int | None:
        """Number of samples in a pass; None for data whose samples have no numbers."""
        return self.source.samples if self._is_divided else None

    def rows(self, step: int) -> Array | list[Any]:
        """The numbers of the samples in a global batch of the running epoch, if they have any."""
        return self.source.rows(self.position.pass_key, self.position.start + step)

    @property
    def fingerprint(self) -> Callable[[], int] | None:
        """Function that returns a checksum of the last global batch before it was cut; None unless every rank reads the
        input itself. It must be equal on all ranks; otherwise, the error message is `description.disagreement`."""
        return self._fingerprint if self.source.traits.is_compared and self._world_size > 1 else None

    def _fingerprint(self) -> int:
        if self._last is None or self._last.fingerprint is None:
            raise RuntimeError("fingerprint() was called before the first batch was read.")
        return self._last.fingerprint

    # Batches.

    def peek(self, *, restart: bool = False) -> LocalBatch:
        """Return a first local batch, for building a model: for streams, the one that the next epoch will yield again.

        Args:
            restart: Whether the next epoch opens the data again, which have then drawn the random numbers of one
                shuffle. Keras does this on JAX and PyTorch in the first `fit` of a model; otherwise, the random numbers
                of the model's initialization and the order of each epoch would differ from those without Phalanx.

        Raises: ConfigurationError if there is no data.
        """
        if restart:
            self.read_first()
            self.position.draw_as_keras()
        try:
            with _reading(self.source):
                return self.local_batch(self.source.peek(restart=restart))
        except StopIteration:
            raise self.description.empty_error(self._rank) from None

    def read_first(self) -> None:
        """Read what Keras reads of a generator before it opens a pass, and before it calls a callback: each of these
        may draw random numbers."""
        if self.source.cursor is not None:
            with _reading(self.source):
                self.source.cursor.read_first()

    def placeholder_batch(self) -> LocalBatch:
        """Return a batch of size 0 with this input's shapes and dtypes, for a rank that ran out of data before others.

        Raises: ConfigurationError if this rank has no data at all.
        """
        share = self._last
        if share is None:
            try:
                share = self.source.peek()
            except StopIteration:
                raise self.description.empty_error(self._rank) from None
        return self.local_batch(LocalBatch(make_placeholder(share.data), 0, None, None))

    def local_batch(self, share: LocalBatch) -> LocalBatch:
        """Convert a share to the form that training takes."""
        self.structure, data = unpack(share.data)
        if self.keras_structure is not None:
            self.structure = self.keras_structure
        return share._replace(data=data, global_size=share.global_size if self._is_divided else None)

    def start_epoch(self, index: int) -> None:
        """Start epoch `index`; `epoch(index, 0)` then yields its batches."""
        self.read_first()
        with _reading(self.source):
            self.position.start_epoch(index)

    def epoch(self, index: int, done: int | None = None) -> Generator[LocalBatch, None, None]:
        """Yield the local batches of epoch `index`.

        Without `steps_per_epoch`, it is one pass over the data. With it, an epoch continues where the last one stopped,
        and ends early, with a warning on the chief, if the data ends.

        Args:
            index: The number of the epoch.
            done: Number of batches after which to continue the running epoch; None to start it on the first request.

        Raises: ConfigurationError if there is no data at all; any error of the source.
        """
        for share in self.shares(index, done):
            yield self.local_batch(share)

    def shares(self, index: int, done: int | None = None) -> Iterator[LocalBatch]:
        """Like `epoch`, with elements in the structure of the dataset."""
        position = self.position
        if done is None:
            self.start_epoch(index)
        seen, is_complete = done or 0, False
        try:
            for share in self._read(done or 0):
                seen += 1
                self._last = share
                yield share
            is_complete = True
        finally:  # even if the reader closes this generator: the next epoch then continues where it stopped
            position.advance(seen, is_complete=is_complete)
        position.end_epoch(index, seen)
        self._check_end(index, seen)

    def _read(self, done: int) -> Iterator[LocalBatch]:
        start = self.position.start
        # In the caller's thread, and not ahead of time, as in Keras: reading may be bound to a thread, call a model of
        # the job, or depend on what the previous step has changed.
        shares = self.source.read(self.position.pass_key, start + done, self.position.end_of(start))
        if self.source.traits.is_read_by_all_ranks:
            yield from shares
            return
        while True:
            # Not around the whole loop: between two elements, the caller takes its step, with collectives of all ranks.
            with _reading(self.source):
                share = next(shares, None)
            if share is None:
                return
            yield share

    def _check_end(self, index: int, seen: int) -> None:
        """Warn of an epoch that ended early; raise ConfigurationError if there was no data at all."""
        if not self._is_divided:  # per-rank data may end anywhere
            return
        steps = self._steps
        if seen == 0 and self._last is None and not self.may_be_empty:
            raise self.description.empty_error(self._rank)
        if steps is None and seen:
            self.position.counted_batches = seen
        elif self._rank == 0 and seen < (steps or 1):
            warnings.warn(
                f"Your input ran out of data in epoch {index + 1}, after {seen} batches where "
                f"{'any' if steps is None else steps} were expected ({self.source.traits.kind}); interrupting the "
                "epoch. Make sure that it can generate at least `steps_per_epoch * epochs` batches, for example by"
                " `.repeat()`, or by passing a PyDataset instead of a generator, which can be read only once.",
                stacklevel=2,
            )

    # Elastic jobs.

    def reshard(self, rank: int, world_size: int, *, repeat: bool = False) -> None:
        """Read for another rank and world size from now on. No iterator of an epoch may be open.

        Args:
            rank: The new rank.
            world_size: The new number of ranks.
            repeat: Whether to read the last batch again. (A per-rank pipeline repeats its own batch; the batches of a
                lost rank are lost.)
        """
        self._rank, self._world_size = rank, world_size
        self.description = replace(self.description, world_size=world_size)
        if self._is_divided:
            self.source.reshard(rank, world_size)
        if repeat and self.source.cursor is not None:
            self.source.cursor.repeat()

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], None]]:
        """Context in which data that is read can be read again; yields a function that rewinds to the start of the
        context."""
        position, cursor = self.position, self.source.cursor
        start = position.next_start

        def rewind() -> None:
            position.next_start = start
            if cursor is not None:
                cursor.rewind()

        if cursor is not None:
            cursor.record(on=True)
        try:
            yield rewind
        finally:
            if cursor is not None:
                cursor.record(on=False)


def _reading(source: Source) -> AbstractContextManager[None]:
    """Context for all code that reads data."""
    return nullcontext() if source.traits.is_read_by_all_ranks else reading_rank_local_data(source.traits.kind)
