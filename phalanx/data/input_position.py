"""The position of a rank in its data: passes, epochs, and resuming in the middle of an epoch.

A *pass* reads all data once. An epoch is one pass or, with `steps_per_epoch`, the next `steps_per_epoch` batches of
one: it then starts where the last epoch stopped. As in Keras's EpochIterator, an epoch never crosses the end of a pass:
if fewer than `steps_per_epoch` batches are left, it ends early, and the next epoch starts a new pass.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.data.sharding_policy import AutoShardPolicy
from phalanx.data.source import PassOrder, Source
from phalanx.errors import ConfigurationError
from phalanx.keras_compat import data_adapters


class EpochStart(NamedTuple):
    """The start of an epoch: everything that another process needs to start it there.

    Attributes:
        pass_key: The epoch in which its pass began.
        batch: The number of its first batch in that pass; for an epoch that has not begun, 0 means a new pass.
        consumed: The number of elements, or whole passes, taken from a stream before that pass; see
            `StreamCursor.total`.
        randomness: The state of the program's random generators that determines the order of that pass; empty if there
            are none, None if it is not known.
    """

    pass_key: int
    batch: int
    consumed: int = 0
    randomness: bytes | None = None


def epoch_end(start: int, num_batches: int | None, steps_per_epoch: int | None) -> int | None:
    """The batch of the pass before which an epoch that started at `start` ends; None for the end of the data."""
    if steps_per_epoch is None:
        return num_batches
    stop = start + steps_per_epoch
    return stop if num_batches is None else min(stop, num_batches)


class InputPosition:
    """The positions of the running epoch and of the next one.

    Args:
        source: The source of the data.
        steps_per_epoch: Number of batches in an epoch; None for a whole pass.
        group: Number of batches that Keras takes at once (`steps_per_execution`): it rounds an epoch up to whole
            groups, and does not notice that the data ends within the last group.
        draws: Whether to draw the random numbers of the program that Keras itself would draw to open a pass.

    Attributes:
        steps_per_epoch: Number of batches in an epoch, rounded up to whole groups; None for a whole pass.
        pass_key: The epoch in which the running pass began; it selects the order of shuffled data.
        start: The batch of the pass with which the running epoch began.
        next_start: The batch of the pass with which the next epoch begins; 0 if it starts a new pass.
        skips_reset: Whether the first epoch starts without a `reset`. Keras's `predict` does so too, so that a
            PyDataset is not reshuffled.
        counted_batches: Number of batches in a pass that was read to its end; None before that.
    """

    def __init__(self, source: Source, steps_per_epoch: int | None, *, group: int = 1, draws: bool):
        self.steps_per_epoch = None if steps_per_epoch is None else -(-steps_per_epoch // group) * group
        self._group = group
        self.pass_key = 0
        self.start = 0
        self.counted_batches: int | None = None
        self._source = source
        # If ranks have their own data, a rank that resumes from this place also has its own random numbers.
        self._order = source.order if source.traits.policy is AutoShardPolicy.DATA else PassOrder()
        self.next_start = 0
        self._draws = draws
        self._is_open = False  # Keras opens the next pass when one ends
        self.skips_reset = False

    # Epochs.

    def start_epoch(self, index: int) -> None:
        """Start epoch `index` and, if necessary, a new pass."""
        if not self.skips_reset:
            self.reset()
        if self.next_start == 0:
            if self._is_open:  # `end_epoch` has already drawn the random numbers for opening it
                self.pass_key = index
            else:
                self.open_pass(index)
            self._is_open = False
            self._order.invalidate()  # each evaluation has a different order, although it starts pass 0 again
            if self._source.cursor is not None:
                self._source.cursor.begin_pass(self.pass_key)
        self._source.on_epoch_begin()
        self.start = self.next_start

    def open_pass(self, index: int) -> None:
        """Start a new pass in epoch `index`."""
        self.pass_key, self.start = index, 0
        self.draw_as_keras()

    def advance(self, batches: int, *, is_complete: bool) -> None:
        """Move to the end of the running epoch.

        Args:
            batches: Number of batches that were read.
            is_complete: Whether the epoch ended by itself. An interrupted epoch continues at the same place, as Keras's
                iterators do.
        """
        # Keras counts whole groups. It does not notice that the data ended within the last one, and then starts the
        # next epoch at the end of the data instead of a new pass.
        is_short = is_complete and -(-batches // self._group) * self._group != self.steps_per_epoch
        self.next_start = self._start_after(self.start + batches, is_short=is_short)

    def end_epoch(self, index: int, batches: int) -> None:
        """End epoch `index`, which read `batches` batches."""
        length = self._source.num_batches or self.counted_batches
        if length is not None and self.start + batches >= length:
            # Keras opens the next pass now; if each epoch is a pass, it opens another when the epoch starts.
            self.draw_as_keras()
            self._order.end_pass(index + 1)
            self._is_open = self.steps_per_epoch is not None
        self._source.on_epoch_end()

    def reset(self) -> None:
        """Make the next epoch start a new pass. Keras does this at the start of each `fit` and `evaluate`, and calls
        the PyDataset's `on_epoch_end` there, which may reshuffle it."""
        self.next_start = 0
        self._is_open = False
        self.skips_reset = True
        self._order.reset()
        self._source.on_epoch_end()

    def draw_as_keras(self) -> None:
        """Draw the random numbers that Keras would draw to open a pass."""
        if self._draws:
            data_adapters.draw_loader_seed()

    def _start_after(self, stop: int, *, is_short: bool) -> int:
        """The start of the epoch after one that ended at `stop`."""
        length = self._source.num_batches
        is_at_end = is_short or (length is not None and stop >= length)
        return 0 if self.steps_per_epoch is None or is_at_end else stop

    # Resuming.

    @property
    def running_epoch(self) -> EpochStart:
        """The place where the running epoch began."""
        return self._start_in_pass(self.start)

    @property
    def next_epoch(self) -> EpochStart:
        """The place where the next epoch begins; valid only between two epochs."""
        return self._start_in_pass(self.next_start) if self.next_start else self.next_pass

    @property
    def next_pass(self) -> EpochStart:
        """The place where the next epoch begins after a `reset`, as in evaluations; valid only between two epochs."""
        cursor = self._source.cursor
        return EpochStart(self.pass_key, 0, 0 if cursor is None else cursor.total, self._order.randomness(None))

    def _start_in_pass(self, batch: int) -> EpochStart:
        """A place in the running pass."""
        cursor = self._source.cursor
        consumed = 0 if cursor is None else cursor.consumed_before
        return EpochStart(self.pass_key, batch, consumed, self._order.randomness(self.pass_key))

    def end_of(self, start: int) -> int | None:
        """The batch before which an epoch that started at `start` ends; None if unknown."""
        return epoch_end(start, self._source.num_batches, self.steps_per_epoch)

    def batches_from(self, place: EpochStart) -> int | None:
        """Number of batches in an epoch that starts at `place`; None if unknown."""
        stop = self.end_of(place.batch)
        return None if stop is None else stop - place.batch

    def start_of_epoch(self, index: int, first: int) -> EpochStart | None:
        """The place where epoch `index` begins in a training that began with epoch `first`; None if the length of the
        data is unknown."""
        if self._source.num_batches is None:
            return None
        began, start = index, 0
        for epoch in range(first, index):
            began = epoch if start == 0 else began
            stop = self.end_of(start)
            assert stop is not None
            start = self._start_after(stop, is_short=stop - start != self.steps_per_epoch)
        return EpochStart(began if start else index, start)

    def resume_epoch(self, place: EpochStart, done: int) -> None:
        """Move into an epoch that another process began at `place`, after `done` batches.

        Raises: ConfigurationError if the order of the data depends on generators other than in that process.
        """
        self.pass_key, self.start = place.pass_key, place.batch
        self._resume(place, done)

    def resume_between_epochs(self, place: EpochStart) -> None:
        """Move to the place of another process between two epochs."""
        self.pass_key, self.next_start = place.pass_key, place.batch
        self._resume(place, 0)

    def _resume(self, place: EpochStart, done: int) -> None:
        self.skips_reset = True  # a reset would start a new pass
        batches = place.batch + done
        # At the start of a pass, other data may start with their own order.
        if place.randomness is not None and not self._order.restore_randomness(place.randomness) and batches:
            raise ConfigurationError(
                "The data draw the order of a pass from other random generators than those with which this pass began, "
                "so training cannot continue in the middle of it. Pass the same data."
            )
        if self._source.cursor is not None:
            self._source.cursor.resume(place.pass_key, batches, place.consumed)
