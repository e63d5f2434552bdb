"""A `fit` that is saved while it runs, and resumes where it was saved.

A checkpoint contains what one rank has between two steps: weights, optimizer, metrics and the order of the data are the
same on all, and what differs (random state of layers) follows from the chief's and the rank. So a job resumes with any
number of ranks.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import keras
import numpy as np

from phalanx.checkpoint import checkpoint_directory
from phalanx.checkpoint.checkpoint_callback import Checkpoint, CheckpointWriter, write_ledger
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory, StoredCheckpoint
from phalanx.data.sample_ledger import SampleLedger
from phalanx.engines.random_state import set_random_state
from phalanx.errors import ConfigurationError, PreemptedError
from phalanx.keras_compat.callback_bases import flatten_callbacks
from phalanx.keras_compat.internals import serialize_weights
from phalanx.monitoring import timeline
from phalanx.training import state_sync
from phalanx.training.fit_position import FitPosition
from phalanx.training.preemption import PreemptionNotice, notified_by_signals
from phalanx.training.replica import Replica, seed_from_program
from phalanx.training.steps.stepper import RetryOnMembershipChange
from phalanx.transport.serialization import decode, encode

logger = logging.getLogger(__name__)

STATE = "fit"
"""Key of the encoded `FitSnapshot` in a checkpoint's state."""

_finished: dict[Path, int] = {}  # number of calls of `fit` that have finished in this process, by directory


@dataclass(kw_only=True)
class FitSnapshot:
    """What a checkpoint contains of a `fit`, besides weights and optimizer.

    Attributes:
        position: where the `fit` stands.
        samples: in a pass over the data; None where unknown.
        batches: in an epoch; None where unknown.
        is_over: whether the training has come to its end.
        stopped: whether it decided so itself.
        seed: of the orders of the data.
        variables: those that a file of weights does not have: random state of layers, metrics.
        random_states: of each rank; see `engines.random_state`.
        pooled: see `Stepper.pooled`.
    """

    position: FitPosition
    samples: int | None
    batches: int | None
    is_over: bool = False
    stopped: bool = False
    seed: int = 0
    variables: list[Any] = field(default_factory=list)
    random_states: list[Any] = field(default_factory=list)
    pooled: dict[str, Any] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """In plain values, flat: as it stands in checkpoints since their first version."""
        content = asdict(self)
        position: dict[str, Any] = content.pop("position")
        return content | position

    @classmethod
    def from_plain(cls, content: dict[str, Any]) -> FitSnapshot:
        """From what `to_plain` returned. Raises TypeError or KeyError for anything else."""
        names = {each.name for each in fields(FitPosition)}
        position = FitPosition(**{name: content[name] for name in names})
        return cls(position=position, **{name: value for name, value in content.items() if name not in names})


class FitResumption:
    """The checkpoints of one call of `fit`, on one rank; made by `resumable`.

    Attributes:
        saver: writes them.
    """

    def __init__(self, checkpoint: Checkpoint, model: Any, replica: Replica, number: int) -> None:
        basename = f"fit{number}"
        directory = CheckpointDirectory(checkpoint.directory, basename=basename, keep=checkpoint.keep)
        self.saver = FitSaver(checkpoint, model, replica, directory, directory.directory / f"{basename}-ledger.json")
        self._model = model
        self._replica = replica
        self._number = number
        self._directory = directory
        self._seed: int | None = None
        self._found: tuple[StoredCheckpoint, FitSnapshot] | None = None
        self._problem = ""
        self._is_searched = False

    @property
    def has_checkpoint(self) -> bool:
        """On the chief: whether there is a checkpoint to resume from."""
        # Not on other ranks: the search removes what looks abandoned, and a chief may be writing it.
        if not self._replica.is_chief:
            return False
        self._search()
        return self._found is not None

    def seed(self) -> int:
        """Determines the orders of the data of this `fit`: that of the checkpoint, or a new one. On the chief, unless
        it has been set; never raises."""
        if self._seed is None:
            self._search()
            self._seed = seed_from_program() ^ self._number if self._found is None else self._found[1].seed
        return self._seed

    def set_seed(self, seed: int) -> None:
        """All ranks know the seed already."""
        self._seed = seed

    def common_seed(self) -> int:
        """The chief's `seed`, on all ranks of a fixed job."""
        self._seed = int(self._replica.broadcast_from_chief(self.seed() if self._replica.is_chief else 0))
        return self._seed

    def restore(self) -> FitSnapshot | None:
        """Give all ranks the state of the newest whole checkpoint; None if there is none. All ranks must call.

        Raises: ConfigurationError on all ranks if the checkpoints cannot be used.
        """
        payload = self._replica.communicator.broadcast_bytes(self._load() if self._replica.is_chief else b"")
        problem, content = decode(payload)
        if problem:
            raise ConfigurationError(problem)
        if content is None:
            return None
        snapshot = FitSnapshot.from_plain(content)
        state_sync.synchronise(self._model, self._replica, metrics=True)
        set_random_state(snapshot.random_states, self._replica.rank)
        self.saver.count_from(snapshot.position.applied)
        return snapshot

    def check(self, snapshot: FitSnapshot, samples: int | None, batches: int | None) -> None:
        """Raise ConfigurationError if the data have another size than when the checkpoint was written."""
        position = snapshot.position
        is_mid_pass = position.step > 0 or position.place[1] > 0
        pairs = [("samples", snapshot.samples, samples)]
        pairs += [("batches in an epoch", snapshot.batches, batches)] if is_mid_pass else []
        for what, then, now in pairs:
            if then is not None and now is not None and then != now:
                raise ConfigurationError(
                    f"The checkpoint in {self._directory.directory} is of a `fit` over data with {then} {what}; the "
                    f"data have {now} now, so training cannot resume at the same place. Pass the same data and batch "
                    f"size, or another directory to start from the beginning."
                )

    def _search(self) -> None:
        """Find the newest whole checkpoint. Problems are reported by `restore`, where all ranks listen."""
        if self._is_searched:
            return
        self._is_searched = True
        try:
            self._directory.sweep()
            found = self._directory.newest()
            if found is not None:
                self._found = found, FitSnapshot.from_plain(decode(base64.b64decode(found.state[STATE])))
        except (ConfigurationError, OSError) as error:
            self._problem = str(error)
        except (KeyError, TypeError) as error:
            self._problem = (
                f"The checkpoints in {self._directory.directory} were not written by this version of "
                f"phalanx.callbacks.Checkpoint ({error}). Give another directory."
            )

    def _load(self) -> bytes:
        """As the chief: put the checkpoint into the model; returns the problem, or the snapshot for all ranks."""
        self._search()
        if self._problem or self._found is None:
            return encode([self._problem, None])
        file, snapshot = self._found
        try:
            checkpoint_directory.load(self._model, file.path)
            for variable, value in zip(_variables_beyond_weights(self._model), snapshot.variables, strict=True):
                variable.assign(value)
        except (ConfigurationError, OSError, ValueError) as error:
            return encode([str(error), None])
        position = snapshot.position
        logger.info("Resuming from %s: epoch %d, step %d.", file.path, position.epoch + 1, position.step)
        return encode(["", {**snapshot.to_plain(), "variables": []}])


class FitSaver:
    """Writes the checkpoints of one call of `fit`. All ranks call its methods; only the chief writes.

    Attributes:
        notice: what the merges of the steps say about saving and preemption.
        applied: steps in all epochs so far.
    """

    def __init__(
        self, checkpoint: Checkpoint, model: Any, replica: Replica, directory: CheckpointDirectory, ledger: Path
    ) -> None:
        self.notice = PreemptionNotice()
        self.applied = 0
        self._checkpoint = checkpoint
        self._model = model
        self._replica = replica
        self._directory = directory
        self._writer = CheckpointWriter(directory)
        self._ledger_file = ledger
        self._epochs_in_ledger = 0
        self._saved_at = 0
        self._saved_time = time.monotonic()

    def count_from(self, applied: int) -> None:
        """So many steps were taken before this process takes part. Steps that it took to warm up gave no notice."""
        self.applied = applied
        self._note_saved()
        self.notice.is_preempted = self.notice.is_save_due = False

    def step_done(self) -> None:
        """A step was applied."""
        self.applied += 1

    def announce(self, *, steps: int = 0) -> None:
        """Before the ranks merge: let the merge tell all whether the chief is to save after so many steps more."""
        is_due = self._replica.is_chief and self._is_due(self.applied + steps) and not self._writer.busy
        self.notice.request_save(is_due)

    def is_save_due(self, *, ends_epoch: bool) -> bool:
        """Between two steps, whether it is time to save; the same on all ranks."""
        saves_each_epoch = self._checkpoint.every_steps is None and self._checkpoint.every_seconds is None
        return self.notice.is_save_due or (ends_epoch and saves_each_epoch)

    def save(self, snapshot: FitSnapshot, ledger: SampleLedger | None) -> None:
        """Save in the background."""
        self.notice.is_save_due = False
        self._note_saved()
        if self._replica.is_chief and not self._writer.busy:
            timeline.current.enter("checkpoint")
            self._writer.begin(*self._copy(snapshot, ledger))
            timeline.current.leave()

    def stop(
        self, capture: Callable[[], FitSnapshot], ledger: SampleLedger | None, retry: RetryOnMembershipChange
    ) -> None:
        """The job was preempted: save, and let no rank exit before that is done. All ranks call it after the same step.

        Args:
            capture: takes the snapshot, on all ranks together.

        Raises: PreemptedError, always.
        """

        def save() -> Any:
            path, snapshot = None, capture()
            if self._replica.is_chief:
                path = self._writer.write(*self._copy(snapshot, ledger))
            return self._replica.broadcast_from_chief(None if path is None else str(path))

        path: Any = retry(save)
        saved = f"It resumes from {path} when it is started again." if path else "Its last state could NOT be saved."
        raise PreemptedError(f"The job was told to end, after {self.applied} steps. {saved}")

    def finish(self, snapshot: FitSnapshot, ledger: SampleLedger | None) -> None:
        """The training is over, and so the state final."""
        if self._replica.is_chief:
            self._writer.wait()
            self._directory.sweep()  # a chief before this one may have been killed while it wrote
            self._writer.write(*self._copy(snapshot, ledger))

    def close(self) -> None:
        """Let the last checkpoint be finished."""
        self._writer.wait()

    def _note_saved(self) -> None:
        self._saved_at, self._saved_time = self.applied, time.monotonic()

    def _is_due(self, applied: int) -> bool:
        steps, seconds = self._checkpoint.every_steps, self._checkpoint.every_seconds
        by_steps = steps is not None and applied // steps > self._saved_at // steps
        return by_steps or (seconds is not None and time.monotonic() - self._saved_time >= seconds)

    def _copy(
        self, snapshot: FitSnapshot, ledger: SampleLedger | None
    ) -> tuple[checkpoint_directory.Snapshot, int, Callable[[], Mapping[str, Any]]]:
        """Copies of all that changes with the next step; the function does the rest of the work, in any thread."""
        model = self._model
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()
        snapshot.position.applied = self.applied
        variables = _variables_beyond_weights(model)
        snapshot.variables = [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in variables]
        frozen = None if ledger is None else ledger.frozen()

        def finish() -> Mapping[str, Any]:
            if frozen is not None:
                snapshot.position.ledger = frozen.encoded()
                self._write_ledger(frozen)
            return {STATE: base64.b64encode(encode(snapshot.to_plain())).decode()}

        return serialize_weights(model), self.applied, finish

    def _write_ledger(self, ledger: SampleLedger) -> None:
        if len(ledger.epochs) == self._epochs_in_ledger:
            return
        self._epochs_in_ledger = len(ledger.epochs)
        with contextlib.suppress(OSError):  # then the checkpoint cannot be written either, and says so
            self._ledger_file.parent.mkdir(parents=True, exist_ok=True)
        write_ledger(self._ledger_file, ledger.readable())


@contextlib.contextmanager
def resumable(callbacks: Any, model: Any, replica: Replica) -> Iterator[FitResumption | None]:
    """Around a `fit`: what its `Checkpoint` does, if there is one among its callbacks.

    Raises: ConfigurationError if there are several.
    """
    found = [callback for callback in flatten_callbacks(callbacks) if isinstance(callback, Checkpoint)]
    if not found:
        yield None
        return
    if len(found) > 1:
        raise ConfigurationError(f"`fit` got {len(found)} Checkpoint callbacks; pass one, with the shorter interval.")
    (checkpoint,) = found
    directory = Path(checkpoint.directory).absolute()
    number = _finished.get(directory, 0)
    resumption = FitResumption(checkpoint, model, replica, number)
    checkpoint.driven, replica.notice = True, resumption.saver.notice
    try:
        with notified_by_signals(resumption.saver.notice):
            yield resumption
            _finished[directory] = number + 1
    finally:
        checkpoint.driven, replica.notice = False, None
        resumption.saver.close()


def has_checkpoint(callbacks: Any) -> bool:
    """Whether there is a `Checkpoint` among the callbacks of a `fit`."""
    return any(isinstance(callback, Checkpoint) for callback in flatten_callbacks(callbacks))


def _variables_beyond_weights(model: Any) -> list[Any]:
    """Variables that a file of weights does not have: of random layers and of metrics."""
    return [*[generator.state for generator in state_sync.seed_generators(model)], *model.metrics_variables]
