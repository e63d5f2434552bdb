"""The ledger: how often each sample was used in applied steps."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from phalanx.data.sharded_input import ShardedInput
from phalanx.errors import ConfigurationError, FrameError
from phalanx.transport.decoding import decode_message

MIN_SIZE_LIMIT_BYTES, MAX_EPOCHS = 2**30, 10_000
"""Limits of a ledger's size: the number of bytes, or the size for this number of epochs, whichever is larger."""

Array = np.ndarray[Any, Any]


class _Encoded(msgspec.Struct):
    epochs: dict[int, bytes]
    running: bytes


class SampleLedger:
    """Counts, for each epoch of a `fit` over indexable data, how often each sample took part in an applied step.

    A step is applied on all members or on none, and all have the same ledger. It counts the samples that were merged:
    the rows of each rank's part of the batch, in the order in which the batch was cut.

    Attributes:
        epochs: Counts of each sample's uses by epoch, shape (samples,), uint8.
    """

    _newest: SampleLedger | None = None

    def __init__(self, samples: int):
        self.samples = samples
        self.epochs: dict[int, Array] = {}
        self._running = np.zeros(samples, np.uint8)  # of the running epoch
        self._held: dict[str, list[Array]] = {}  # by task: samples of steps not merged yet

    @classmethod
    def create(cls, source: ShardedInput) -> SampleLedger | None:
        """Create the ledger of an input; None if its samples have no numbers (streams)."""
        samples = source.samples
        cls._newest = None if samples is None else cls(samples)
        return cls._newest

    @classmethod
    def newest(cls) -> SampleLedger | None:
        """The ledger of the last `fit` in this process."""
        return cls._newest

    def count_step(self, source: ShardedInput, step: int, sizes: tuple[int, ...]) -> bool:
        """Count an applied step of the running epoch, in which the ranks had parts of these sizes.

        Returns: whether the samples have numbers; otherwise there is no ledger from now on.
        """
        rows = self._rows(source, step, sizes)
        if rows is not None:
            self._count(rows)
        return rows is not None

    def hold_local_step(self, source: ShardedInput, step: int, sizes: tuple[int, ...], tasks: Sequence[str]) -> bool:
        """Hold back a local step of each rank, not merged yet. `tasks` are the tasks of the ranks.

        Returns: see `count_step`.
        """
        rows = self._rows(source, step, sizes)
        if rows is not None:
            for task, part in zip(tasks, np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
                self._held.setdefault(task, []).append(part)
        return rows is not None

    def _rows(self, source: ShardedInput, step: int, sizes: tuple[int, ...]) -> Array | None:
        """The numbers of the samples in a step; None if they have none."""
        keys = source.rows(step)[: sum(sizes)]
        # Keys in a list come from a DataLoader's sampler, and may be of any type that its dataset accepts.
        if isinstance(keys, np.ndarray) or all(isinstance(k, int | np.integer) and 0 <= k < self.samples for k in keys):
            return np.asarray(keys, np.int64)
        SampleLedger._newest = None
        return None

    def _count(self, rows: Array) -> None:
        np.add.at(self._running, rows, np.uint8(1))  # `+= 1` would count a sample drawn twice for a batch only once

    def count_held(self, tasks: Sequence[str]) -> None:
        """Count the held steps of these tasks, which were merged. Held steps of other tasks are lost."""
        for task in tasks:
            for rows in self._held.get(task, []):
                self._count(rows)
        self._held.clear()

    def end_epoch(self, epoch: int) -> None:
        self.epochs[epoch] = self._running
        self._running = np.zeros(self.samples, np.uint8)

    def encoded(self) -> bytes:
        """The whole ledger, for a process that joins. Very small if each sample was used once."""
        epochs = {epoch: counts.tobytes() for epoch, counts in self.epochs.items()}
        return zlib.compress(msgspec.msgpack.encode(_Encoded(epochs, self._running.tobytes())), 1)

    def load(self, content: bytes) -> None:
        """Load another rank's ledger (`encoded`).

        Raises: FrameError if the bytes are not a ledger.
        """
        try:
            # Bounded, because a few bytes may expand to any size.
            expanded = zlib.decompressobj().decompress(content, max(MIN_SIZE_LIMIT_BYTES, self.samples * MAX_EPOCHS))
            other = decode_message(expanded, _Encoded)
        except (zlib.error, FrameError) as error:
            raise FrameError(f"A sample ledger cannot be read: {error}") from error
        self.epochs = {epoch: np.frombuffer(counts, np.uint8).copy() for epoch, counts in other.epochs.items()}
        self._running = np.frombuffer(other.running, np.uint8).copy()

    def snapshot(self) -> SampleLedger:
        """A copy of the current state, for another thread."""
        ledger = SampleLedger(self.samples)
        ledger.epochs = dict(self.epochs)  # counts of finished epochs no longer change
        ledger._running = self._running.copy()
        return ledger

    def as_dict(self) -> dict[str, Any]:
        """The finished epochs as JSON types: `runs` are `[first sample, last sample, times]`."""
        epochs = {}
        for epoch, counts in self.epochs.items():
            starts = np.concatenate([[0], np.flatnonzero(np.diff(counts)) + 1, [len(counts)]])
            runs = [[int(a), int(b) - 1, int(counts[a])] for a, b in itertools.pairwise(starts)]
            times, samples = np.unique(counts, return_counts=True)
            used = {str(t): int(n) for t, n in zip(times, samples, strict=True)}
            epochs[str(epoch)] = {"samples used so often": used, "runs": runs}
        return {"samples": self.samples, "epochs": epochs}


def ledger() -> dict[int, np.ndarray[Any, Any]]:
    """Counts of each sample's uses in applied steps, in the last `fit` of this process.

    `fit` keeps a ledger in elastic jobs and with a `phalanx.callbacks.Checkpoint`, over arrays and map-style
    DataLoaders, whose samples have numbers. Resumed training continues its ledger.

    Returns: the counts of each finished epoch, shape (samples,), uint8; equal on all ranks.

    Raises: ConfigurationError if there is none.
    """
    newest = SampleLedger.newest()
    if newest is None:
        raise ConfigurationError(
            "There is no ledger: it is kept by `fit` over arrays and map-style DataLoaders, in elastic jobs "
            "(phalanx run --workers MIN:MAX) or with a phalanx.callbacks.Checkpoint."
        )
    return {epoch: counts.copy() for epoch, counts in newest.epochs.items()}
