"""Position of a running `fit`: what another process needs to continue it, in addition to the state of the model.

Such a process either joins an elastic job (`elastic_recovery`), or restarts from a checkpoint (`fit_resumption`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx.checkpoint.callback_state import CallbackStateTracker, restore_states
from phalanx.checkpoint.result_encoding import as_plain_value, plain_history
from phalanx.data.input_position import EpochStart
from phalanx.data.sample_ledger import SampleLedger
from phalanx.engines.random_state import State, random_state, set_random_state
from phalanx.training import state_sync
from phalanx.training.fit_state import ReplicaFitState
from phalanx.training.joint_batches import JointBatch, JointBatches
from phalanx.training.replica_model import ReplicaModel


@dataclass(kw_only=True)
class FitPosition:
    """Position of a `fit` between two steps or two epochs; the same on all ranks.

    Attributes:
        epoch: Index of the epoch of the next step.
        step: Index of the next step; also 0 between two epochs.
        place: Place in the data where the running epoch began, or, between two epochs, where the next one begins.
        validation_place: Place in the validation data where the next evaluation begins; None without any.
        epochs: Indices of the epochs that `History` has recorded.
        history: Logs that `History` has recorded, by name.
        logs: Logs of the last finished epoch.
        callbacks: Class and state of each callback that was passed.
        ledger: The encoded `SampleLedger`; empty without one.
        applied: Steps in all epochs so far.
    """

    epoch: int
    step: int
    place: EpochStart
    validation_place: EpochStart | None = None
    epochs: list[int]
    history: dict[str, list[Any]]
    logs: dict[str, Any]
    callbacks: list[tuple[str, bytes]]
    ledger: bytes = b""
    applied: int = 0

    def __post_init__(self) -> None:
        self.place = EpochStart(*self.place)  # decoded ones are plain tuples
        if self.validation_place is not None:
            self.validation_place = EpochStart(*self.validation_place)


class FitRecorder:
    """Recorder of what another process would need to continue a `fit`: positions and the sample ledger.

    Args:
        is_continuable: Whether another process may continue it; if not, callbacks and samples are not tracked.

    Attributes:
        ledger: The sample ledger; None if the samples have no numbers, or are not tracked.
        applied: Steps in all epochs so far.
    """

    def __init__(self, replica_model: ReplicaModel, state: ReplicaFitState, *, is_continuable: bool) -> None:
        self.ledger = SampleLedger.create(state.source) if is_continuable else None
        self.applied = 0
        self._model = replica_model
        self._state = state
        self._is_continuable = is_continuable
        self._callback_states: CallbackStateTracker | None = None

    def track_callbacks(self) -> None:
        """Track changes in the callbacks, which have their model and parameters by this point."""
        if self._is_continuable:
            self._callback_states = CallbackStateTracker(self._state.arguments.callbacks)

    def record_step(self, batch: JointBatch) -> None:
        """Record a step; if the stepper does not merge every step, it counts only for the rank that took it."""
        self.applied += 1
        if self.ledger is None:
            return
        source, stepper = self._state.source, self._state.stepper
        if stepper.merges_every_step:
            is_counted = self.ledger.count_step(source, batch.step, batch.sizes)
        else:
            # Not counted as used before the merge: until then, a rank's work would be lost with it.
            tasks = [member.task for member in self._model.replica.communicator.membership.members]
            is_counted = self.ledger.hold_local_step(source, batch.step, batch.sizes, tasks)
        if not is_counted:
            self.ledger = None

    def record_merge(self, tasks: Sequence[str]) -> None:
        """Record the merge of the steps that these tasks took independently."""
        if self.ledger is not None and tasks:
            self.ledger.count_held(tasks)

    def end_epoch(self) -> None:
        """Record the end of an epoch."""
        if self.ledger is not None:
            self.ledger.end_epoch(self._state.epoch)

    def callback_states(self) -> list[tuple[str, bytes]]:
        """Return the state that the callbacks have accumulated since this `fit` began."""
        assert self._callback_states is not None, "the callbacks are tracked before the first step"
        return self._callback_states.changes(self._state.arguments.callbacks)

    def position(self) -> FitPosition:
        """Return the current position of this `fit`, without the ledger, which takes time to encode."""
        state = self._state
        data, batches, history = state.source.position, state.batches, self._model.model.history
        return FitPosition(
            epoch=state.epoch,
            # `batches` is None exactly between two epochs. The place is then that of the next pass, because the
            # previous one is over for the source, too.
            step=0 if batches is None else batches.done,
            place=data.next_epoch if batches is None else data.running_epoch,
            validation_place=None if state.validation is None else state.validation.position.next_pass,
            epochs=list(history.epoch),
            history=plain_history(history),
            logs={name: as_plain_value(value) for name, value in state.logs.items()},
            callbacks=self.callback_states(),
            applied=self.applied,
        )

    def restore(self, position: FitPosition, restart_epoch: Callable[[], None] | None, fresh: State) -> None:
        """Continue from a position; the model and the random numbers already have their state.

        Args:
            restart_epoch: Begins the epoch for the callbacks; None if the position is between two epochs.
            fresh: Initial random state of the program, with which data are read again.
        """
        state = self._state
        state.epoch, state.logs, self.applied = position.epoch, dict(position.logs), position.applied
        if self.ledger is not None and position.ledger:
            self.ledger.load(position.ledger)
        with self._rereading(fresh):
            if state.validation is not None and position.validation_place is not None:
                state.validation.position.resume_between_epochs(position.validation_place)
            if restart_epoch is None:
                state.source.position.resume_between_epochs(position.place)
            else:
                state.source.position.resume_epoch(position.place, position.step)
        # Cleared by `on_train_begin`.
        history = self._model.model.history
        history.epoch, history.history = list(position.epochs), dict(position.history)
        if restart_epoch is not None:
            restart_epoch()
            enter_epoch(self._model, state, position.step)
        # Last, because `on_train_begin` and `on_epoch_begin` reset counters of callbacks.
        restore_states(state.arguments.callbacks, position.callbacks)

    @contextmanager
    def _rereading(self, fresh: State) -> Iterator[None]:
        """Reread data inside the context with the initial random state; restore the current state on exit."""
        streams = self._model.replica.random_streams
        drawn, position = random_state(), streams.position
        set_random_state(fresh)
        try:
            yield
        finally:
            set_random_state(drawn)
            streams.position = position


def enter_epoch(replica_model: ReplicaModel, state: ReplicaFitState, step: int) -> None:
    """Begin in the middle of an epoch, at the source's position. What callbacks changed when the epoch began is in the
    model's state."""
    replica_model.engine.begin()
    state.batches = JointBatches(state.source, state.epoch, replica_model.replica, done=step)


def restart_epoch(replica_model: ReplicaModel, state: ReplicaFitState) -> None:
    """Begin the epoch for callbacks that did not see its start, without their effects on weights and learning rate."""
    with state_sync.preserved_state(replica_model.model):
        state.callbacks.on_epoch_begin(state.epoch)
