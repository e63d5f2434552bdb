"""Joint iteration of the ranks over their inputs: equal numbers of steps, and each rank's share of every batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.arrays.tree import leaves, map_leaves
from phalanx.collectives.communicator import Array, Communicator
from phalanx.data import AutoShardPolicy, ShardedInput, local_range
from phalanx.data.batch_split import sample_checksum
from phalanx.data.micro_batches import MicroBatch, cut_micro_batches, sizes_of_ranks
from phalanx.errors import DisagreementError, UnsupportedError
from phalanx.monitoring import timeline
from phalanx.training.checks.rank_comparison import RankComparison
from phalanx.training.replica import Replica, single_replica
from phalanx.transport.serialization import decode, encode

COMPARED_BATCHES = 3
"""Number of batches that are compared over the ranks at the start of an epoch, and after each membership change, if
each rank reads a stream itself."""


@dataclass(frozen=True, slots=True)
class JointBatch:
    """This rank's part of a global batch that all ranks have agreed on.

    Attributes:
        data: `(x, y, sample_weight)`; a placeholder of one sample if `size` is 0.
        sizes: Number of samples in every rank's part, in rank order.
        rank: This rank.
        step: Index of the global batch in its epoch.
        micro_batches: Micro-batches that this rank computes, if global batches are divided into them; `data` is
            then the whole batch.
        fixed_size: Size of every global batch of this input, see `SourceTraits`.
        is_whole: Whether `data` is the whole batch, because a mesh cannot divide it as it was read.
    """

    data: tuple[Any, Any, Any]
    sizes: tuple[int, ...]
    rank: int
    step: int
    micro_batches: tuple[MicroBatch, ...] = ()
    fixed_size: int | None = None
    is_whole: bool = False

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def global_size(self) -> int:
        return sum(self.sizes)

    @property
    def share(self) -> float:
        return 1.0 if self.is_whole else self.size / self.global_size


class JointBatches:
    """One epoch of a source: the same number of batches on every rank.

    If the input alone does not determine what the other ranks have (streams), the ranks exchange sizes before each
    step. If ranks have different data, one whose stream has ended takes part with an empty part until all have ended.

    Args:
        done: Number of batches of the epoch that are done; None to iterate from the beginning.

    Attributes:
        done: Number of batches that have been used; the caller counts them.
    """

    def __init__(self, source: ShardedInput, epoch: int, replica: Replica, done: int | None = None):
        if done is None:
            source.start_epoch(epoch)  # not later: a checkpoint may need its place before the first batch is read
        self._source = source
        self._epoch = epoch
        self._replica = replica
        # `_read` counts batches taken from the source, `done` those trained on; `_read` is at most one ahead. That
        # batch is repeated when the membership changes.
        self.done = self._read = done or 0
        self._batches = source.epoch(epoch, self.done)
        self._compared = self.done + COMPARED_BATCHES  # batches before this one are compared
        self._current: JointBatch | None = None
        self._peeked: JointBatch | None = None

    def next(self) -> JointBatch | None:
        """Return the next batch; None at the end of the epoch.

        Raises:
            DisagreementError: if the ranks should read the same stream but read different ones; see `RankComparison`.
            MembershipChangedError: see `reshard`.
        """
        if self._peeked is not None:
            peeked, self._peeked = self._peeked, None
            return peeked
        timeline.current.enter("data")
        self._comparison = RankComparison(self._replica)  # before the exchanges of this step
        if self._replica.micro_batches:
            self._current = self._next_whole(self._replica.micro_batches)
        else:
            self._current = self._next_uniform() if self._source.is_uniform else self._next_of_streams()
            if self._current is not None and self._replica.mesh_parts is not None:
                self._current = fit_to_mesh(self._current, self._replica, self._replica.mesh_parts)
        timeline.current.leave()
        return self._current

    def peek(self) -> JointBatch | None:
        """Return what `next` will return."""
        self._peeked = self.next()
        return self._peeked

    def switch_to_whole_batches(self) -> Replica:
        """Give every rank whole batches from here on, starting after what `next` returned last, as if it were alone.

        Returns: a replica without others.

        Raises: UnsupportedError if ranks have different data.
        """
        if self._source.source.traits.policy is not AutoShardPolicy.DATA:
            raise UnsupportedError(
                "The outputs do not have a row for each sample, so each replica must predict whole batches, but "
                "each one has data of its own. Pass all replicas the same data."
            )
        self._replica, self._peeked = single_replica(), None
        self.reshard()
        return self._replica

    def is_current(self, batch: JointBatch) -> bool:
        """Whether this batch, the last that `next` returned, is divided for the current members."""
        return self._current is batch

    def reshard(self) -> None:
        """Repeat a batch that was read but not used, divided for the current members, after a membership change."""
        again = self._read > self.done
        self._batches.close()
        # The source may be divided again only while no iterator of it is open.
        self._source.reshard(*read_part(self._replica), repeat=again)
        self._batches = self._source.epoch(self._epoch, self.done)
        self._read = self.done
        self._compared = self.done + COMPARED_BATCHES
        self._current = self._peeked = None

    def close(self) -> None:
        """Stop reading. In its next epoch the source continues here if Keras's would."""
        self._batches.close()

    def _next_uniform(self) -> JointBatch | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        step, self._read = self._read, self._read + 1
        assert batch.global_size is not None
        if step < self._compared and self._source.fingerprint is not None:
            notes = self._replica.communicator.all_gather(np.array([self._source.fingerprint()], np.int64))
            self._check_same(step, [int(note[0]) for note in notes])
        return self._joint(batch.data, _sizes(batch.global_size, self._replica.world_size), step)

    def _next_whole(self, count: int) -> JointBatch | None:
        """Read the global batch on each rank, and compute some of its micro-batches."""
        source, replica = self._source, self._replica
        batch = next(self._batches, None)
        step = self._read
        # Uniform sources are equally long on all ranks: unless batches are compared, the end needs no collective.
        if not source.is_uniform or step < self._compared:
            parts = leaves(batch.data) if batch and step < self._compared else []
            note = encode([batch.size, [*map(sample_checksum, parts)]] if batch else None)
            self._check_same(step, [decode(each) for each in replica.communicator.all_gather_bytes(note)])
        if batch is None:
            return None
        self._read += 1
        micro_batches = cut_micro_batches(batch.data, batch.size, count, replica.rank, replica.world_size)
        return self._joint(batch.data, sizes_of_ranks(batch.size, count, replica.world_size), step, micro_batches)

    def _next_of_streams(self) -> JointBatch | None:
        source = self._source
        batch = next(self._batches, None)
        step = self._read
        if batch is not None:
            self._read += 1
        fingerprint = source.fingerprint() if batch and source.fingerprint and step < self._compared else 0
        # Every rank sends a note before each step, even after its stream has ended, because the others wait for it.
        note = np.array([batch is None, batch.size if batch else 0, fingerprint], np.int64)
        notes = np.stack(self._replica.communicator.all_gather(note))
        if notes[:, 0].all():
            return None
        if source.fingerprint:
            self._check_same(step, [None if ended else each for ended, _, each in notes.tolist()])
            if batch is None:
                return None  # only ranks that are behind read on, and end
        return self._joint((batch or source.placeholder_batch()).data, tuple(notes[:, 1].tolist()), step)

    def _joint(
        self, data: Any, sizes: tuple[int, ...], step: int, micro_batches: tuple[MicroBatch, ...] = ()
    ) -> JointBatch:
        return JointBatch(data, sizes, self._replica.rank, step, micro_batches, self._source.source.traits.fixed_size)

    def _check_same(self, step: int, read: Sequence[Any]) -> None:
        """Compare the ranks' batch fingerprints; None marks a rank whose data have ended.

        Raises: DisagreementError, see `RankComparison`.
        """
        if self._comparison.difference(read) is None:
            return
        advice = self._source.description.disagreement
        ended = ", ".join(str(rank) for rank, each in enumerate(read) if each is None)
        if ended:
            raise DisagreementError(
                f"The data ended on rank {ended} after {step} batches of epoch {self._epoch}, but not on the others. "
                f"{advice}"
            )
        raise DisagreementError(f"Batch {step} of epoch {self._epoch}: {advice}")


@functools.lru_cache(maxsize=8)  # for the usual batch size and the last batch's
def _sizes(global_size: int, world_size: int) -> tuple[int, ...]:
    ranges = [local_range(global_size, rank, world_size) for rank in range(world_size)]
    return tuple(stop - start for start, stop in ranges)


def fit_to_mesh(batch: JointBatch, replica: Replica, parts: int) -> JointBatch:
    """Return the batch as the processes of one program put it on their mesh: each rank's equal part, or the whole
    batch, which they exchange if equal parts are not what their devices need.

    Args:
        parts: See `Replica.mesh_parts`.
    """
    divides = parts % replica.world_size == 0 and batch.global_size % parts == 0 and len(set(batch.sizes)) == 1
    if divides or replica.world_size == 1:
        return batch

    def whole(own: Any) -> Any:
        if not getattr(own, "ndim", 0):
            return own
        return np.concatenate(all_gather_rows(own if batch.size else own[:0], replica.communicator))

    return replace(batch, data=map_leaves(whole, batch.data), is_whole=True)


def all_gather_rows(rows: Array, communicator: Communicator) -> list[Array]:
    """Gather each rank's rows, including rows of strings, as lookup layers take and produce them."""
    if rows.dtype.kind not in "OSU":
        return communicator.all_gather(np.ascontiguousarray(rows))
    return [decode(each).astype(rows.dtype) for each in communicator.all_gather_bytes(encode(rows.astype(object)))]


def read_part(replica: Replica) -> tuple[int, int]:
    """Return which part of each global batch this process reads, and of how many: all of it if it is divided into
    micro-batches."""
    return (0, 1) if replica.micro_batches else (replica.rank, replica.world_size)


def grouped_batches(batches: JointBatches, size: int) -> Iterator[tuple[int, int, Iterator[JointBatch]]]:
    """Yield all batches of a pass in groups of `size` (`steps_per_execution`): the indices of the first and the last,
    which callbacks see, and the batches, which are read as they are taken. Take all batches of a group."""

    def group(batch: JointBatch | None) -> Iterator[JointBatch]:
        while batch is not None:
            yield batch
            # Once the caller requests the next one: before that, the batch may have to be repeated.
            batches.done += 1
            batch = batches.next() if batches.done % size else None

    try:
        while (first := batches.next()) is not None:
            # For the last group, Keras also reports the last step of a full one.
            yield first.step, first.step + size - 1, group(first)
    finally:
        batches.close()
