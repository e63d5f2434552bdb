"""One rank's view of the data of a `fit`, `evaluate` or `predict`: epochs of local batches."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from phalanx.data.batch_split import LocalShare, stand_in
from phalanx.data.elements import Array, ElementStructure, unpack
from phalanx.data.local_batch import LocalBatch
from phalanx.data.prefetch import DEPTH, Prefetch
from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.data.source import Source
from phalanx.errors import ConfigurationError
from phalanx.keras_compat import data_adapters


def epoch_end(start: int, num_batches: int | None, steps_per_epoch: int | None) -> int | None:
    """The position in the pass at which an epoch that begins at `start` ends; None: at the end of the data.

    As Keras's EpochIterator has it, an epoch never runs over the end of a pass: where less than
    `steps_per_epoch` is left, it ends early and the next epoch begins a new pass.
    """
    if steps_per_epoch is None:
        return num_batches
    stop = start + steps_per_epoch
    return stop if num_batches is None else min(stop, num_batches)


class BatchNotAvailableError(Exception):
    """A batch that was asked for by number has been passed by."""


class ShardedInput:
    """The local batches of one rank, epoch by epoch; made by `shard_input`.

    Used from one thread. Epochs are read one after the other: an epoch's iterator is exhausted or closed
    before the next is begun.

    Args:
        as_keras: whether to draw the random numbers of the program that Keras itself would draw to open a pass.
    """

    def __init__(
        self,
        source: Source,
        *,
        rank: int,
        world_size: int,
        steps_per_epoch: int | None = None,
        prefetch: int = DEPTH,
        as_keras: bool = False,
    ):
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ConfigurationError(f"steps_per_epoch must be at least 1; got {steps_per_epoch}.")
        self._source = source
        self._draws = as_keras and not source.draws
        self._opened = False  # the next pass, by Keras as the last one ended
        self._rank = rank
        self._world_size = world_size
        self._steps_per_epoch = steps_per_epoch
        self._prefetch = 0 if source.reads_ahead else prefetch
        self._counted: int | None = None  # batches of a pass that was read to its end
        self._position = 0  # in the pass; 0: the next epoch begins a new one
        self._start = 0  # of the running epoch, in the pass
        self._pass = 0  # the epoch in which the running pass began: the key of its order
        self._last: LocalShare | None = None
        self._reset_done = False
        self.form = ElementStructure.PARTS
        self._stream: Iterator[LocalShare] = iter(())
        self._read = 0  # batches of the pass that were taken from the stream

    @property
    def steps_per_epoch(self) -> int | None:
        return self._steps_per_epoch

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch; None while that is unknown. After the first pass over data of unknown length it
        is known (but not for per-rank pipelines, which may differ)."""
        if self._steps_per_epoch is not None:
            return self._steps_per_epoch
        return self._counted if self._source.num_batches is None else self._source.num_batches

    @property
    def uniform(self) -> bool:
        """Whether every rank is known to see as many batches of the same global sizes: then the end of the
        data needs no agreement between ranks."""
        return self._source.uniform

    @property
    def sample(self) -> Array:
        """Numbers from all over the data that the ranks' should share; none where the data cannot be looked at."""
        found: Array = getattr(self._source, "sample", np.zeros(0))
        return found

    @property
    def samples(self) -> int | None:
        """How many samples a pass has, where they have numbers; else None."""
        found: int | None = getattr(self._source, "samples", None)
        return found

    def rows(self, step: int) -> Array:
        """The numbers of the samples of a global batch of the running epoch, where `samples` is not None."""
        rows: Array = self._source.rows(self._pass, self._start + step)  # type: ignore[attr-defined]
        return rows

    @property
    def signature(self) -> str:
        """A line that is the same on every rank that was given the same data; compare it before training.

        It names lengths, shapes and dtypes, so ranks whose `uniform` inputs differ in length are told apart
        before one of them waits for the others.
        """
        return f"{self._source.signature}, policy {self._source.policy.name}, steps {self._steps_per_epoch}"

    @property
    def fingerprint(self) -> Callable[[], int] | None:
        """For inputs that every rank reads for itself: a checksum of the last global batch, taken before it
        was cut. It must be equal on all ranks; `disagreement()` is the message where it is not."""
        return self._fingerprint if self._source.checked else None

    @property
    def policy(self) -> AutoShardPolicy:
        """The policy in effect; never AUTO."""
        return self._source.policy

    @property
    def policy_line(self) -> str:
        """One line that says how the input is divided."""
        per_rank = {
            AutoShardPolicy.DATA: "each of the {n} replicas takes its part of every global batch",
            AutoShardPolicy.FILE: "each of the {n} replicas reads its own files",
            AutoShardPolicy.OFF: "each of the {n} replicas reads all of its own dataset",
            AutoShardPolicy.HINT: "each of the {n} replicas reads the shard that the dataset names",
        }[self.policy].format(n=self._world_size)
        return f"Input sharding: {self.policy.name} ({self._source.kind}): {per_rank}; {self._source.reason}."

    def explain(self) -> str:
        """The policy, its reason and what each rank reads, one line for each rank."""
        shares = self._source.shares(self._world_size)
        return "\n".join([self.policy_line, *(f"  rank {rank} {share}" for rank, share in enumerate(shares))])

    def disagreement(self) -> str:
        """What is wrong, and what to do, where the ranks' fingerprints of a batch differ."""
        return (
            f"The ranks read different global batches from the {self._source.kind}, so cutting them would "
            "use some samples twice and others never. Every rank must read the same data in the same order. "
            "Give each shuffle a seed (`dataset.shuffle(n, seed=1)`, `Dataset.list_files(..., seed=1)`, "
            "`numpy.random.default_rng(seed)`, or `keras.utils.set_random_seed(seed)` before the data is "
            "made), and list files in sorted order. If each rank is meant to read data of its own, pass "
            "`strategy.distribute_datasets_from_function(fn)` to fit instead."
        )

    def peek(self, *, restart: bool = False) -> LocalBatch:
        """A first local batch, for building a model: of streams the one that the next epoch will yield again.

        Args:
            restart: the next epoch opens the dataset anew, which so has drawn once from the seeds of its
                shuffles. Keras does this on JAX and PyTorch in the first `fit` of a model; only so do the
                epochs of a dataset that shuffles itself come in the order that they have without Phalanx.

        Raises: ConfigurationError if there is no data.
        """
        if restart:
            self._open()
        try:
            return self._local(self._source.peek(restart=restart))
        except StopIteration:
            raise self._no_data() from None

    def stand_in(self) -> LocalBatch:
        """A batch of size 0, shapes and dtypes like this input's, for a rank that ran out of data first."""
        share = self._last if self._last is not None else self._source.peek()
        return self._local(LocalShare(stand_in(share.data), 0, None, None))

    def _local(self, share: LocalShare) -> LocalBatch:
        self.form, data = unpack(share.data)
        return LocalBatch(data, share.size, share.global_size)

    def reset(self) -> None:
        """Forget the position: the next epoch begins a new pass. Keras does so at the start of each `fit`
        and `evaluate`, and calls the PyDataset's `on_epoch_end` there, which may reshuffle it."""
        self._position = 0
        self._opened = False
        self._reset_done = True
        self._source.on_epoch_end()

    def take_as_it_is(self) -> None:
        """Do not `reset` before the first epoch; as Keras's `predict`, lest a PyDataset be reshuffled."""
        self._reset_done = True

    def start_over(self) -> None:
        """Another process has begun anew: as `reset`, and the orders that it had told count no more."""
        self.reset()
        source: Any = self._source
        if hasattr(source, "forget_order"):
            source.forget_order()

    def epoch(self, index: int) -> Generator[LocalBatch, None, None]:
        """The local batches of epoch `index`.

        Without `steps_per_epoch` it is one pass over the data. With it, an epoch goes on where the last one
        stopped, and ends early, with a warning on the chief, where the data ends.

        Raises: ConfigurationError if there is no data at all; whatever the source raises.
        """
        for share in self.shares(index):
            yield self._local(share)

    # Jobs whose members come and go.

    def regroup(self, rank: int, world_size: int) -> None:
        """This rank has another number now, among another number of ranks. No epoch's iterator is open."""
        self._rank, self._world_size = rank, world_size
        self._source.regroup(rank, world_size)

    def read_directly(self) -> None:
        """Do not read ahead: what was read could not be cut anew."""
        self._prefetch = 0

    @contextlib.contextmanager
    def remembering(self) -> Iterator[Callable[[], None]]:
        """While inside, what is read can be read again; yields what goes back to where it was entered."""
        position = self._position

        def rewind() -> None:
            self._position = position
            self._source.rewind()

        self._source.remember(on=True)
        try:
            yield rewind
        finally:
            self._source.remember(on=False)

    @property
    def taken(self) -> int:
        """Of data that are read on from one evaluation to the next, how many batches; 0 of all others."""
        return self._source.taken

    def catch_up(self, taken: int) -> None:
        """Other ranks, or a former life, have taken so many batches."""
        if taken:
            self._source.skip(0, taken)

    @property
    def place(self) -> tuple[int, int]:
        """Where the running epoch began: the pass over the data, and the number of its first batch in it."""
        return self._pass, self._start

    @property
    def randomness(self) -> bytes:
        """What the order of the running pass follows from that the program has made itself, such as a DataLoader's
        generator; empty where there is nothing of the kind."""
        return self._randomness(self._pass)

    @property
    def next_randomness(self) -> bytes:
        """Between two epochs: the same of the pass in which the next one begins."""
        return self._randomness(self._pass if self._position else None)

    def _randomness(self, key: int | None) -> bytes:
        source: Any = self._source
        return source.randomness(key) if hasattr(source, "randomness") else b""

    def continue_with(self, randomness: bytes) -> None:
        """Read the pass of which `randomness` was this, on another rank or in a former life."""
        source: Any = self._source
        if randomness and hasattr(source, "continue_with"):
            source.continue_with(randomness)

    def go_to(self, place: tuple[int, int], done: int, randomness: bytes = b"") -> None:
        """Take the place of another rank, in whose running epoch so many batches are done."""
        self._pass, self._start = place
        self._reset_done = True
        self.continue_with(randomness)
        self._source.skip(self._pass, self._start + done)

    def place_of(self, index: int, first: int) -> tuple[int, int] | None:
        """Where epoch `index` begins (`place`) in a training that began with epoch `first`; None if that cannot be
        told, as the length of the data is not known."""
        batches, steps = self._source.num_batches, self._steps_per_epoch
        if batches is None:
            return None
        began, position = index, 0
        for epoch in range(first, index):
            began = epoch if position == 0 else began
            stop = epoch_end(position, batches, steps)
            assert stop is not None
            position = self._next_position(stop, short=stop - position != steps)
        return (began if position else index), position

    def batches_from(self, place: tuple[int, int]) -> int | None:
        """How many batches an epoch has that begins there."""
        stop = epoch_end(place[1], self._source.num_batches, self._steps_per_epoch)
        return None if stop is None else stop - place[1]

    @property
    def next_place(self) -> tuple[int, int]:
        """Between two epochs: the pass over the data in which the next one begins, and the number of its first batch
        in it; 0 if it begins a new pass."""
        return self._pass, self._position

    def go_between(self, place: tuple[int, int], randomness: bytes = b"") -> None:
        """Stand between two epochs where another process stood (`next_place`, `next_randomness`)."""
        self._pass, self._position = place
        self._reset_done = True
        self.continue_with(randomness)
        if self._position:
            self._source.skip(self._pass, self._position)

    def repeat(self) -> None:
        """The batch that was read last is to be read again. (A per-rank pipeline reads its own again: those of a rank
        that was lost are lost.)"""
        self._source.repeat()

    def going_on(self, index: int, done: int) -> Generator[LocalBatch, None, None]:
        """The rest of epoch `index`, of which so many batches are done."""
        for share in self.shares(index, done):
            yield self._local(share)

    def shares(self, index: int, done: int | None = None) -> Iterator[LocalShare]:
        """As `epoch`, with the elements in the source's own structure; with `done`, as `going_on`."""
        steps = self._steps_per_epoch
        if done is None:
            self._enter(index)
            self._start = self._position
        start, seen, complete = self._start, done or 0, False
        try:
            for share in self._reading(start, done or 0):
                seen += 1
                self._last = share
                yield share
            if seen == 0 and start > 0:
                # The last epoch took the last batch of data of unknown length: this one begins anew.
                start, self._start, self._pass = 0, 0, index
                self._open()
                for share in self._reading(start):
                    seen += 1
                    self._last = share
                    yield share
            complete = True
        finally:
            # An epoch that was broken off goes on at the same place, as Keras's iterators do.
            self._position = self._next_position(start + seen, short=complete and seen != steps)
        self._leave(start + seen)
        self._check_end(index, seen, start)

    # Epochs whose batches several processes take by number, each some of them (parameter servers). Between `begin` and
    # `finish` stands one epoch.

    def begin(self, index: int) -> int | None:
        """Begin epoch `index`; the number of its batches, None while that is unknown."""
        self._enter(index)
        if self._source.by_number:
            self._source.read(self._pass, self._position, self._position)  # makes the order of a new pass
        elif self._position == 0:
            self._stream, self._read = self._source.read(self._pass, 0, None), 0
        stop = epoch_end(self._position, self._source.num_batches, self._steps_per_epoch)
        return None if stop is None else stop - self._position

    def batch(self, number: int) -> LocalBatch | None:
        """Batch `number` of the epoch; None where the data end before it.

        Raises: BatchGoneError if it is behind: a stream cannot be read twice.
        """
        place = self._position + number
        if self._source.by_number:
            share = next(self._source.read(self._pass, place, place + 1), None)
        else:
            if place < self._read:
                raise BatchNotAvailableError(number)
            share = next(itertools.islice(self._stream, place - self._read, None), None)
            self._read = place + 1
        if share is None:
            return None
        self._last = share
        return self._local(share)

    def finish(self, steps: int) -> None:
        """End the epoch, which had so many batches."""
        stop = self._position + steps
        self._position = self._next_position(stop, short=steps != self._steps_per_epoch)
        self._leave(stop)

    @property
    def pass_began(self) -> int:
        """The epoch in which the running pass over the data began."""
        return self._pass

    def _enter(self, index: int) -> None:
        """Epoch `index` begins, and perhaps a new pass with it."""
        if not self._reset_done:
            self.reset()
        if self._position == 0:
            self._pass = index
            if not self._opened:
                self._open()
            self._opened = False
        self._source.on_epoch_begin()

    def _leave(self, stop: int) -> None:
        """An epoch has come to its end, at this place of the pass."""
        batches = self._source.num_batches or self._counted
        if batches is not None and stop >= batches:
            # Keras opens the next pass now; where each epoch is one, it opens another when that begins.
            self._open()
            self._opened = self._steps_per_epoch is not None
        self._source.on_epoch_end()

    def _open(self) -> None:
        if self._draws:
            data_adapters.draw_as_a_loader()

    def _reading(self, start: int, done: int = 0) -> Iterator[LocalShare]:
        stop = epoch_end(start, self._source.num_batches, self._steps_per_epoch)
        shares = self._source.read(self._pass, start + done, stop)
        if self._prefetch == 0:
            yield from shares
        else:
            # Bounded by the epoch: reading on would take data that `on_epoch_end` is yet to reshuffle.
            with contextlib.closing(Prefetch(shares, self._prefetch)) as ahead:
                yield from ahead

    def _next_position(self, position: int, *, short: bool) -> int:
        num_batches = self._source.num_batches
        at_end = short or (num_batches is not None and position >= num_batches)
        return 0 if self._steps_per_epoch is None or at_end else position

    def _check_end(self, index: int, seen: int, start: int) -> None:
        per_rank = self._source.policy is not AutoShardPolicy.DATA
        if self._steps_per_epoch is None:
            if seen and not per_rank:
                self._counted = seen
            missing = seen == 0
        else:
            missing = seen < self._steps_per_epoch
        if seen == 0 and self._last is None and not per_rank:
            raise self._no_data()
        if missing and self._rank == 0 and not per_rank:
            expected = "any" if self._steps_per_epoch is None else self._steps_per_epoch
            warnings.warn(
                f"Your input ran out of data in epoch {index + 1}, after {seen} batches where {expected} "
                f"were expected ({self._source.kind}); interrupting the epoch. Make sure that it can "
                "generate at least `steps_per_epoch * epochs` batches, for example by `.repeat()`, or by "
                "passing a PyDataset instead of a generator, which can be read only once.",
                stacklevel=2,
            )

    def _no_data(self) -> ConfigurationError:
        return ConfigurationError(
            f"The input is empty: {self._source.kind} gave no batch on rank {self._rank} of "
            f"{self._world_size}. Expected at least one batch. Check the paths, filters and `take`/`skip` of "
            "the pipeline, and that a generator was not used up before."
        )

    def _fingerprint(self) -> int:
        if self._last is None or self._last.fingerprint is None:
            raise RuntimeError("fingerprint() was called before the first batch was read.")
        return self._last.fingerprint
