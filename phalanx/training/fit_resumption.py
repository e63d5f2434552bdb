"""Saving of a running `fit`, and resumption where it was saved.

A checkpoint contains the state of one rank between two steps: weights, optimizer, metrics and data order are equal on
all ranks, and what differs (random state of layers) follows from the chief's state and the rank. So a job resumes with
any number of ranks. The chief writes it, or each rank its part if one program spans all ranks; both read either format.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpoint import checkpoint_directory
from phalanx.checkpoint.checkpoint_callback import Checkpoint
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory, StoredCheckpoint
from phalanx.checkpoint.fit_writer import FitWriter
from phalanx.checkpoint.sharded_checkpoint import ShardedCheckpoint, newest_sharded
from phalanx.engines.random_state import set_random_state
from phalanx.errors import ConfigurationError, FrameError, PhalanxError, SupersededError
from phalanx.keras_compat.callback_bases import flatten_callbacks
from phalanx.runtime.exit_codes import sendable
from phalanx.storage.paths import StoragePath, storage_path
from phalanx.training import state_sync
from phalanx.training.fit_position import FitPosition
from phalanx.training.preemption import PreemptionNotice, notified_by_signals
from phalanx.training.replica import Replica, seed_from_program
from phalanx.transport.serialization import decode, encode

logger = logging.getLogger(__name__)

FIT_STATE_KEY = "fit"
"""Key of the encoded `FitSnapshot` in a checkpoint's state."""

_finished: dict[StoragePath, int] = {}  # number of `fit` calls that have finished in this process, by directory


@dataclass(kw_only=True)
class FitSnapshot(FitPosition):
    """The part of a checkpoint that describes a `fit`, in addition to weights and optimizer: its position, and more.

    Attributes:
        samples: Number of samples in a pass over the data; None if unknown.
        batches: Number of batches in an epoch; None if unknown.
        is_over: Whether training has ended.
        stopped: Whether training stopped itself (`stop_training`).
        seed: Determines the order of the data.
        variables: Variables that are not in weight files: random state of layers, metrics.
        random_states: Random state of the program, see `engines.random_state`; in earlier versions, of all ranks.
        streams: Position of `PerRankRandomStreams`.
        pooled: See `ReplicaStepper.combined_state`.
    """

    samples: int | None
    batches: int | None
    is_over: bool = False
    stopped: bool = False
    seed: int = 0
    variables: list[Any] = field(default_factory=list)
    random_states: list[Any] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    pooled: dict[str, Any] = field(default_factory=dict)


class FitResumption:
    """Checkpoints of one call of `fit`, on one rank; created by `resumable`.

    Attributes:
        checkpoint: The callback, with its intervals.
        directory: Checkpoints of this `fit`, with the claim for both formats.
        ledger_path: Path of the readable sample ledger.
        writer: Writes checkpoints in the background, in the format of this job.
        notice: Notice in the merges of steps about saving and preemption.
    """

    def __init__(self, checkpoint: Checkpoint, model: Any, replica: Replica, number: int) -> None:
        basename = f"fit{number}"
        self.checkpoint = checkpoint
        self.directory = CheckpointDirectory(
            checkpoint.directory, basename=basename, keep=checkpoint.keep, generation=lambda: replica.generation
        )
        self.ledger_path = self.directory.directory / f"{basename}-{checkpoint_directory.LEDGER_SUFFIX}"
        self.writer = FitWriter(self.directory)
        # Whether one program spans all ranks, so that each writes and reads its part.
        self._spans_processes = replica.mesh_parts is not None
        if self._spans_processes:
            sharded = ShardedCheckpoint(checkpoint.directory, basename=basename, keep=checkpoint.keep)
            # One claim for both formats, with the generation of elastic jobs, which a ShardedCheckpoint does not
            # handle; `resumable` releases it.
            sharded.claim = self.directory.claim
            self.writer = FitWriter(sharded)
        self.notice = PreemptionNotice()
        self._model = model
        self._replica = replica
        self._basename = basename
        self._number = number
        # Results of `_search`, which runs once per `fit` and only on the chief: the checkpoint, or a problem for
        # `restore` to report.
        self._seed: int | None = None
        self._found: tuple[StoredCheckpoint, FitSnapshot] | None = None
        self._problem = ""
        self._is_searched = False

    @property
    def has_checkpoint(self) -> bool:
        """On the chief, whether there is a checkpoint to resume from."""
        # Not on other ranks: the search removes what looks abandoned, and a chief may be writing it.
        if not self._replica.is_chief:
            return False
        self._search()
        return self._found is not None

    def seed(self) -> int:
        """Return the seed for the data order of this `fit`: the checkpoint's, or a new one. Only on the chief unless it
        has been set; never raises."""
        if self._seed is None:
            self._search()
            self._seed = seed_from_program() ^ self._number if self._found is None else self._found[1].seed
        return self._seed

    def set_seed(self, seed: int) -> None:
        """Set a seed that all ranks already share."""
        self._seed = seed

    def common_seed(self) -> int:
        """Return the chief's `seed` on all ranks of a job of fixed size."""
        self._seed = int(self._replica.broadcast_from_chief(self.seed() if self._replica.is_chief else 0))
        return self._seed

    def restore(self) -> FitSnapshot | None:
        """Restore the newest complete checkpoint on all ranks; None if there is none. All ranks must call.

        Raises: ConfigurationError on all ranks if the checkpoints cannot be used.
        """
        payload = self._replica.communicator.broadcast_bytes(self._load() if self._replica.is_chief else b"")
        problem, path, content = decode(payload)
        if problem:
            raise ConfigurationError(problem)
        if content is None:
            return None
        # So far only the chief has the weights, or no rank if one program spans all of them. `synchronize` sends them,
        # and the variables that are not in weight files, to all.
        snapshot = FitSnapshot(**content)
        if self._spans_processes:
            self._load_part(Path(os.fsdecode(path)), snapshot)
        state_sync.synchronize(self._model, self._replica, metrics=True)
        if snapshot.random_states:
            set_random_state(snapshot.random_states[0])
        if snapshot.streams:
            self._replica.random_streams.position = [int(number) for number in snapshot.streams]
        return snapshot

    def check(self, snapshot: FitSnapshot, samples: int | None, batches: int | None) -> None:
        """Raise ConfigurationError if the size of the data has changed since the checkpoint was written."""
        # Between two passes nothing depends on how a pass is divided, so the batch size may change there.
        is_mid_pass = snapshot.step > 0 or snapshot.place.batch > 0
        pairs = [("samples", snapshot.samples, samples)]
        pairs += [("batches in an epoch", snapshot.batches, batches)] if is_mid_pass else []
        for what, then, now in pairs:
            if then is not None and now is not None and then != now:
                raise ConfigurationError(
                    f"The checkpoint in {self.directory.directory} is of a `fit` over data with {then} {what}; the "
                    f"data have {now} now, so training cannot resume at the same place. Pass the same data and batch "
                    f"size, or another directory to start from the beginning."
                )

    def _search(self) -> None:
        """Find the newest complete checkpoint. `restore` reports problems, because all ranks take part in it."""
        if self._is_searched:
            return
        self._is_searched = True
        try:
            self.directory.remove_partial_files()
            found = self.newest()
            if found is not None:
                self._found = found, FitSnapshot(**decode(base64.b64decode(found.state[FIT_STATE_KEY])))
        # Not raised: the other ranks are in the broadcast of the seed, and would not see the error.
        except (ConfigurationError, SupersededError, OSError) as error:
            self._problem = str(error)
        except (KeyError, TypeError, FrameError) as error:
            self._problem = (
                f"The checkpoints in {self.directory.directory} were not written by this version of "
                f"phalanx.callbacks.Checkpoint ({error}). Give another directory."
            )

    def newest(self) -> StoredCheckpoint | None:
        """Return the newest checkpoint of either format."""
        found = [self.directory.newest(), newest_sharded(self.directory.directory, self._basename)]
        return max((each for each in found if each is not None), key=lambda each: each.step, default=None)

    def _load(self) -> bytes:
        """As the chief, load the checkpoint into the model, unless all ranks do so; return the problem, or the snapshot
        for all ranks and its path."""
        self._search()
        if self._problem or self._found is None:
            return encode([sendable(self._problem), b"", None])
        stored, snapshot = self._found
        content = vars(snapshot)
        if not self._spans_processes:
            try:
                self._load_from(stored.path, snapshot)
            except (PhalanxError, OSError, ValueError) as error:
                return encode([sendable(str(error)), b"", None])
            # The variables are in the chief's model now, which sends them to the others.
            content = {**content, "variables": []}
        logger.info("Resuming from %s: epoch %d, step %d.", stored.path, snapshot.epoch + 1, snapshot.step)
        return encode(["", os.fsencode(str(stored.path)), content])

    def _load_part(self, path: Path, snapshot: FitSnapshot) -> None:
        """As one process of a program, all of which must call, read what belongs on its devices.

        Raises: ConfigurationError on all ranks if one cannot see the checkpoint, or if it is of another model.
        """
        communicator = self._replica.communicator
        # Before any rank reads: Orbax's restore is a collective, which would wait for a rank without the files.
        seen = [bool(each[0]) for each in communicator.all_gather_bytes(bytes([path.exists()]))]
        if not all(seen):
            blind = [
                member.task for member, sees in zip(communicator.membership.members, seen, strict=True) if not sees
            ]
            raise ConfigurationError(
                f"{', '.join(blind)} cannot see {path}, of which every process reads its part. Pass Checkpoint a "
                f"directory that all hosts share."
            )
        try:
            self._load_from(path, snapshot)
        except (OSError, ValueError) as error:
            raise ConfigurationError(str(error)) from error

    def _load_from(self, path: StoragePath, snapshot: FitSnapshot) -> None:
        if isinstance(path, Path) and path.is_dir():
            ShardedCheckpoint(path.parent, basename=self._basename).restore(self._model, snapshot.applied)
        else:
            checkpoint_directory.load(self._model, path)
        for variable, value in zip(variables_beyond_weights(self._model), snapshot.variables, strict=True):
            variable.assign(value)


@contextlib.contextmanager
def resumable(callbacks: Any, model: Any, replica: Replica) -> Iterator[FitResumption | None]:
    """Drive the `Checkpoint` of a `fit` inside the context, if its callbacks include one.

    Raises: ConfigurationError if there are several, or if it needs orbax-checkpoint and that is missing.
    """
    found = [callback for callback in flatten_callbacks(callbacks) if isinstance(callback, Checkpoint)]
    if not found:
        yield None
        return
    if len(found) > 1:
        raise ConfigurationError(f"`fit` got {len(found)} Checkpoint callbacks; pass one, with the shorter interval.")
    (checkpoint,) = found
    directory = storage_path(checkpoint.directory, "directory").absolute()
    number = _finished.get(directory, 0)
    resumption = FitResumption(checkpoint, model, replica, number)
    former = replica.notice  # of a `fit` in whose callbacks this one runs
    checkpoint.is_managed_by_fit, replica.notice = True, resumption.notice
    try:
        with notified_by_signals(resumption.notice.signal):
            yield resumption
            # Only if `fit` has returned: one that raised is retried with the same number.
            _finished[directory] = number + 1
    finally:
        checkpoint.is_managed_by_fit, replica.notice = False, former
        try:
            resumption.writer.wait()
        finally:
            resumption.directory.claim.release()


def has_checkpoint(callbacks: Any) -> bool:
    """Whether there is a `Checkpoint` among the callbacks of a `fit`."""
    return any(isinstance(callback, Checkpoint) for callback in flatten_callbacks(callbacks))


def variables_beyond_weights(model: Any) -> list[Any]:
    """Return the variables that are not in weight files: those of random layers and of metrics."""
    return [*[generator.state for generator in state_sync.seed_generators(model)], *model.metrics_variables]
