"""A `fit` that is saved while it runs, and goes on where it was saved.

What is saved is what one rank has between two steps: weights, optimizer, metrics and the order of the data are the same
on all, and what differs (random state of layers) follows from the chief's and the rank. So a job goes on with any
number of ranks.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from phalanx.checkpoint import checkpoint_directory
from phalanx.checkpoint.checkpoint_callback import Checkpoint, CheckpointWriter, write_ledger
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from phalanx.data.sample_ledger import SampleLedger
from phalanx.engines.random_state import set_random_state
from phalanx.errors import ConfigurationError, PreemptedError
from phalanx.monitoring import timeline
from phalanx.training import callback_list as callback_lists
from phalanx.training import state_sync
from phalanx.training.preemption import PreemptionNotice, heeded
from phalanx.training.replica import Replica, own_seed
from phalanx.training.steps.stepper import RetryOnMembershipChange
from phalanx.transport.serialization import decode, encode

logger = logging.getLogger(__name__)

STATE = "fit"
"""In the checkpoint's own state: `FitSnapshot`, encoded."""

_finished: dict[Path, int] = {}  # calls of `fit` that have come to their end in this process, by directory


@dataclass
class FitSnapshot:
    """What a checkpoint says of a `fit`, beside weights and optimizer.

    Attributes:
        epoch, step: the next step.
        place: in the data: of the running epoch (`ShardedInput.place`), or, where step is 0, of the next one
            (`ShardedInput.next_place`).
        samples, batches: of a pass over the data; None where unknown.
        logs: of the last epoch that is over.
        callbacks: for each that was passed, its class and what it remembers (`callbacks.remembered`).
        is_over: the training has come to its end, by its own decision if `stopped`.
        seed: of the orders of the data.
        applied: steps in all epochs so far.
        variables: those that a file of weights does not have: random state of layers, metrics.
        random_states: of each rank; see `backends.random_state`.
        ledger: encoded; empty without one.
        pooled: see `Stepper.pooled`.
        randomness: see `ShardedInput.randomness`.
        validated: of the validation's data, see `ShardedInput.taken`.
    """

    epoch: int
    step: int
    place: tuple[int, int]
    samples: int | None
    batches: int | None
    epochs: list[int]
    history: dict[str, list[Any]]
    logs: dict[str, Any]
    callbacks: list[tuple[str, bytes]]
    is_over: bool = False
    stopped: bool = False
    seed: int = 0
    applied: int = 0
    variables: list[Any] = field(default_factory=list)
    random_states: list[Any] = field(default_factory=list)
    ledger: bytes = b""
    pooled: dict[str, Any] = field(default_factory=dict)
    randomness: bytes = b""
    validated: int = 0


class FitResumption:
    """The checkpoints of one call of `fit`, on one rank; made by `kept`."""

    def __init__(self, checkpoint: Checkpoint, model: Any, replica: Replica, number: int):
        self.notice = PreemptionNotice()
        self.applied = 0
        self._checkpoint = checkpoint
        self._model = model
        self._replica = replica
        self._number = number
        self._name = f"fit{number}"
        self._checkpoints = CheckpointDirectory(checkpoint.directory, basename=self._name, keep=checkpoint.keep)
        self._saver = CheckpointWriter(self._checkpoints)
        self._seed: int | None = None
        self._found: tuple[checkpoint_directory.StoredCheckpoint, FitSnapshot] | None = None
        self._problem = ""
        self._looked = False
        self._saved_at = 0
        self._saved_time = time.monotonic()
        self._ledgers_written = 0

    # The beginning.

    def seed(self) -> int:
        """Of the orders of this `fit`: that of the checkpoint, or a new one. On the chief; it raises nothing."""
        if self._seed is None:
            self._look()
            self._seed = own_seed() ^ self._number if self._found is None else self._found[1].seed
        return self._seed

    @property
    def goes_on(self) -> bool:
        """On the chief: whether there is a checkpoint to go on from."""
        self._look()
        return self._found is not None and self._replica.is_chief

    def begin_with(self, seed: int) -> None:
        """All ranks know the seed already."""
        self._seed = seed

    def common_seed(self) -> int:
        """The chief's `seed`, on all ranks of a fixed job."""
        chiefs: Any = self._replica.from_chief(self.seed() if self._replica.is_chief else 0)
        self._seed = int(chiefs)
        return self._seed

    def restore(self) -> FitSnapshot | None:
        """Give all ranks the state of the newest whole checkpoint; None if there is none. Called by all ranks.

        Raises: ConfigurationError on all ranks if the checkpoints cannot be used.
        """
        payload = self._replica.communicator.broadcast_bytes(self._load() if self._replica.is_chief else b"")
        problem, content = decode(payload)
        if problem:
            raise ConfigurationError(problem)
        if content is None:
            return None
        noted = FitSnapshot(**content)
        state_sync.synchronise(self._model, self._replica, metrics=True)
        set_random_state(noted.random_states, self._replica.rank)
        self.count_from(noted.applied)
        return noted

    def count_from(self, applied: int) -> None:
        """So many steps were made before this process takes part. What it did to warm up told nobody of a notice."""
        self.applied = applied
        self._has_saved()
        self.notice.given = self.notice.wished = False

    def _look(self) -> None:
        """Find the newest whole checkpoint. What is wrong is said later, when all ranks listen."""
        if self._looked:
            return
        self._looked = True
        try:
            self._checkpoints.sweep()
            found = self._checkpoints.newest()
            if found is not None:
                self._found = found, FitSnapshot(**decode(base64.b64decode(found.state[STATE])))
        except (ConfigurationError, OSError) as error:
            self._problem = str(error)
        except (KeyError, TypeError) as error:
            self._problem = (
                f"The checkpoints in {self._checkpoint.directory} were not written by this version of "
                f"phalanx.callbacks.Checkpoint ({error}). Give another directory."
            )

    def _load(self) -> bytes:
        """As the chief: put the checkpoint into the model; what all ranks must know."""
        self._look()
        if self._problem or self._found is None:
            return encode([self._problem, None])
        file, noted = self._found
        try:
            checkpoint_directory.load(self._model, file.path)
            for variable, value in zip(_more_variables(self._model), noted.variables, strict=True):
                variable.assign(value)
        except (ConfigurationError, OSError, ValueError) as error:
            return encode([str(error), None])
        logger.info("Going on from %s: epoch %d, step %d.", file.path, noted.epoch + 1, noted.step)
        return encode(["", {**asdict(noted), "variables": []}])

    def check(self, noted: FitSnapshot, samples: int | None, batches: int | None) -> None:
        """Raise ConfigurationError if the data have another size than when the checkpoint was made."""
        in_the_middle = noted.step > 0 or noted.place[1] > 0
        pairs = [("samples", noted.samples, samples)]
        pairs += [("batches in an epoch", noted.batches, batches)] if in_the_middle else []
        for what, then, now in pairs:
            if then is not None and now is not None and then != now:
                raise ConfigurationError(
                    f"The checkpoint in {self._checkpoint.directory} is of a `fit` over data with {then} {what}; now "
                    f"they have {now}, so it cannot go on at the same place. Pass the same data and batch size, or "
                    f"give another directory to begin anew."
                )

    # While it runs.

    def wish(self, *, steps: int = 0) -> None:
        """Before the ranks merge: whether the chief wants to save when so many steps more are done."""
        self.notice.wish(self._replica.is_chief and self._is_due(self.applied + steps) and not self._saver.busy)

    def step_done(self) -> None:
        self.applied += 1

    def wants_to_save(self, *, ends_epoch: bool) -> bool:
        """Between two steps, whether it is time to save; the same on all ranks."""
        return self.notice.wished or (ends_epoch and self._each_epoch)

    def save(self, noted: FitSnapshot, ledger: SampleLedger | None) -> None:
        """Save, in the background. Called on all ranks; only the chief does it."""
        self.notice.wished = False
        self._has_saved()
        if self._replica.is_chief and not self._saver.busy:
            timeline.current.enter("checkpoint")
            self._saver.begin(*self._snapshot(noted, ledger))
            timeline.current.leave()

    def stop(
        self, note: Callable[[], FitSnapshot], ledger: SampleLedger | None, steadily: RetryOnMembershipChange
    ) -> None:
        """The job was told to end: save, and let no rank go before that is done. Called by all ranks, after the same
        step.

        Args:
            note: called on all ranks together.

        Raises: PreemptedError, always.
        """

        def save() -> Any:
            place, noted = None, note()
            if self._replica.is_chief:
                place = self._saver.write(*self._snapshot(noted, ledger))
            return self._replica.from_chief(None if place is None else str(place))

        place: Any = steadily(save)
        saved = f"It goes on from {place} when it is started again." if place else "Its last state could NOT be saved."
        raise PreemptedError(f"The job was told to end, after {self.applied} steps. {saved}")

    def finish(self, noted: FitSnapshot, ledger: SampleLedger | None) -> None:
        """The training is over, and so the state final."""
        if self._replica.is_chief:
            self._saver.wait()
            self._checkpoints.sweep()  # a chief before this one may have been killed while it wrote
            self._saver.write(*self._snapshot(noted, ledger))

    def close(self) -> None:
        """Let the last checkpoint be finished."""
        self._saver.wait()

    def is_over(self, noted: FitSnapshot, epochs: int) -> bool:
        """Whether nothing is left to train."""
        return noted.is_over and (noted.stopped or noted.epoch >= epochs)

    @property
    def _each_epoch(self) -> bool:
        return self._checkpoint.every_steps is None and self._checkpoint.every_seconds is None

    def _has_saved(self) -> None:
        self._saved_at, self._saved_time = self.applied, time.monotonic()

    def _is_due(self, applied: int) -> bool:
        steps, seconds = self._checkpoint.every_steps, self._checkpoint.every_seconds
        by_steps = steps is not None and applied // steps > self._saved_at // steps
        return by_steps or (seconds is not None and time.monotonic() - self._saved_time >= seconds)

    def _snapshot(
        self, noted: FitSnapshot, ledger: SampleLedger | None
    ) -> tuple[checkpoint_directory.Snapshot, int, Callable[[], Mapping[str, Any]]]:
        """Copies of all that changes with the next step; the rest of the work is left to who calls the function."""
        model = self._model
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()
        noted.seed, noted.applied = self.seed(), self.applied
        noted.variables = [np.array(keras.ops.convert_to_numpy(v.value)) for v in _more_variables(model)]
        frozen = None if ledger is None else ledger.frozen()

        def finish() -> Mapping[str, Any]:
            if frozen is not None:
                noted.ledger = frozen.encoded()
                self._write_ledger(frozen)
            return {STATE: base64.b64encode(encode(asdict(noted))).decode()}

        return checkpoint_directory.snapshot(model), self.applied, finish

    def _write_ledger(self, ledger: SampleLedger) -> None:
        if len(ledger.epochs) == self._ledgers_written:
            return
        self._ledgers_written = len(ledger.epochs)
        with contextlib.suppress(OSError):  # then the checkpoint cannot be written either, and says so
            self._checkpoints.directory.mkdir(parents=True, exist_ok=True)
        write_ledger(self._checkpoints.directory / f"{self._name}-ledger.json", ledger.readable())


@contextlib.contextmanager
def kept(callbacks: Any, model: Any, replica: Replica) -> Iterator[FitResumption | None]:
    """Around a `fit`: what its `Checkpoint` does, if there is one among its callbacks.

    Raises: ConfigurationError if there are several.
    """
    found = [callback for callback in callback_lists.flat(callbacks) if isinstance(callback, Checkpoint)]
    if not found:
        yield None
        return
    if len(found) > 1:
        raise ConfigurationError(f"`fit` got {len(found)} Checkpoint callbacks; pass one, with the shorter interval.")
    (checkpoint,) = found
    directory = Path(checkpoint.directory).absolute()
    number = _finished.get(directory, 0)
    resumption = FitResumption(checkpoint, model, replica, number)
    checkpoint.driven, replica.notice = True, resumption.notice
    try:
        with heeded(resumption.notice):
            yield resumption
            _finished[directory] = number + 1
    finally:
        checkpoint.driven, replica.notice = False, None
        resumption.close()


def has_checkpoint(callbacks: Any) -> bool:
    """Whether there is a `Checkpoint` among the callbacks of a `fit`."""
    return any(isinstance(callback, Checkpoint) for callback in callback_lists.flat(callbacks))


def _more_variables(model: Any) -> list[Any]:
    """Variables that a file of weights does not have: of random layers and of metrics."""
    return [*[generator.state for generator in state_sync.seed_generators(model)], *model.metrics_variables]
