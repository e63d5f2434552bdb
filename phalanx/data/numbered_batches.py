"""Epochs whose batches are read by number, so that each worker reads only some (training with parameter servers)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from phalanx.data.batch_split import LocalBatch
from phalanx.data.sharded_input import ShardedInput
from phalanx.data.source import StreamCursor


class BatchNotAvailableError(Exception):
    """The stream has already passed the requested batch."""


class NumberedBatches:
    """Batches of an input by number within the epoch. An epoch lasts from `start_epoch` to `end_epoch`.

    Attributes:
        sharded: The input, as read by a single rank.
    """

    def __init__(self, sharded: ShardedInput):
        self.sharded = sharded
        self._source = sharded.source
        self._stream: Iterator[LocalBatch] = iter(())
        self._index = 0  # of the running epoch
        self._read = 0  # batches of the pass taken from the stream

    @property
    def passes(self) -> StreamCursor | None:
        """The cursor of a stream, if the order of a pass depends on the number of passes; else None."""
        cursor = self._source.cursor
        return None if cursor is None or cursor.pass_counter is None else cursor

    @property
    def pass_key(self) -> int:
        """The epoch in which the running pass over the data began."""
        return self.sharded.position.pass_key

    def start_epoch(self, index: int) -> int | None:
        """Start epoch `index`, and return its number of batches; None if unknown."""
        position, self._index = self.sharded.position, index
        position.start_epoch(index)
        if self._source.traits.is_random_access:
            # Draw the order of the epoch now, on every worker: the chief sends it when it opens the epoch.
            self._source.read(position.pass_key, position.start, position.end_of(position.start))
        elif position.start == 0:
            self._stream, self._read = self._source.read(position.pass_key, 0, None), 0
        return position.batches_from(position.running_epoch)

    def batch(self, number: int) -> LocalBatch | None:
        """Return batch `number` of the epoch; None if the data ends before it.

        Raises: BatchNotAvailableError if a stream has passed it.
        """
        place = self.sharded.position.start + number
        if self._source.traits.is_random_access:
            share = next(self._source.read(self.sharded.position.pass_key, place, place + 1), None)
        else:
            if place < self._read:
                raise BatchNotAvailableError(number)
            share = next(itertools.islice(self._stream, place - self._read, None), None)
            self._read = place + 1
        return None if share is None else self.sharded.local_batch(share)

    def end_epoch(self, steps: int) -> None:
        """End the epoch, which had `steps` batches."""
        self.sharded.position.advance(steps, is_complete=True)
        if self.sharded.position.next_start == 0 and self.passes is not None:
            self.passes.leave_pass()
        self.sharded.position.end_epoch(self._index, steps)

    def restart(self) -> None:
        """Start a new pass in the next epoch, in a newly agreed order, because another process has started over."""
        self.sharded.position.reset()
