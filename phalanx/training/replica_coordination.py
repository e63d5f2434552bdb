"""Coordination of replicas in a `fit`: every decision is a collective, taken by all ranks or broadcast by the chief."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras

from phalanx.checkpoint.backup_and_restore import step_of_backup
from phalanx.checkpoint.callback_state import append_to_log_files
from phalanx.checkpoint.result_encoding import as_plain_value
from phalanx.data.input_position import EpochStart
from phalanx.keras_compat.model_state import (
    logs_differ_from_metrics,
    logs_of_empty_epoch,
    overrides,
    plain_logs,
    set_mode,
)
from phalanx.monitoring import timeline
from phalanx.runtime import progress
from phalanx.training import state_sync
from phalanx.training.checks.model_checks import annotate_size_errors
from phalanx.training.evaluation import evaluate_by_program, evaluate_on_replicas
from phalanx.training.fit_position import enter_epoch, restart_epoch
from phalanx.training.fit_setup import ReplicaFit
from phalanx.training.joint_batches import JointBatch, JointBatches
from phalanx.transport.serialization import decode, encode


class ReplicaCoordination:
    """Coordination of one `fit` on all ranks; see `Coordination`."""

    def __init__(self, fit: ReplicaFit) -> None:
        self._state = fit.state
        self._replica_model = fit.model
        self._model = fit.model.model
        self._replica = fit.model.replica
        self._recorder = fit.recorder
        self._recovery = fit.recovery
        self._checkpointing = fit.checkpointing
        self._retry = fit.retry
        self.steps_per_group: int = self._model.steps_per_execution
        self._has_trained = False  # whether this process has taken a step
        self._is_empty_epoch = False
        self._step_logs: dict[str, Any] = {}  # of the last epoch that had a step
        self._is_over = False
        self._enters_mid_epoch = False  # whether this process joined or resumed in the middle of the epoch

    def begin(self) -> None:
        """See `Coordination.begin`."""
        if self._recovery is not None and self._replica.is_candidate:
            self._recovery.join()
        else:
            self._start_from_checkpoint_or_chief()
        if self._checkpointing is not None:
            self._checkpointing.start()

    def _start_from_checkpoint_or_chief(self) -> None:
        """Start all ranks from a checkpoint, or from the chief's state."""
        state, checkpointing = self._state, self._checkpointing
        if checkpointing is not None and checkpointing.has_checkpoint:
            append_to_log_files(state.arguments.callbacks)
        state.callbacks.on_train_begin()
        progress.report("initial values")
        snapshot = None if checkpointing is None else checkpointing.restore()
        if snapshot is None:
            self._start_from_chief()
        else:
            self._is_over = snapshot.is_over and (snapshot.stopped or snapshot.epoch >= state.arguments.epochs)
        self._replica_model.mark_synchronized()

    def _start_from_chief(self) -> None:
        """Start all ranks from the chief's state, which may come from a backup (`BackupAndRestore`)."""
        state, source, replica = self._state, self._state.source, self._replica
        first = state.arguments.initial_epoch
        step = step_of_backup(state.arguments.callbacks) if replica.is_chief else 0
        # Keras's BackupAndRestore stores the restored epoch in `_initial_epoch` in `on_train_begin`.
        own = [self._model._initial_epoch or first, step]
        chiefs: Any = self._retry(lambda: replica.broadcast_from_chief(own))
        state.epoch, step = chiefs

        def synchronize() -> None:
            state_sync.synchronize(self._model, replica)
            self._replica_model.merge.synchronize()

        self._retry(synchronize)
        place = source.position.start_of_epoch(state.epoch, first) if step else None
        if place is None:
            return
        # The backup is from the epoch's last step: the epoch is over, but Keras has not counted it.
        if step == source.position.batches_from(place):
            state.epoch += 1
            source.position.resume_between_epochs(
                source.position.start_of_epoch(state.epoch, first) or EpochStart(0, 0)
            )
        else:
            self._model.reset_metrics()
            restart_epoch(self._replica_model, state)
            source.position.resume_epoch(place, step)
            enter_epoch(self._replica_model, state, step)

    def is_over(self) -> bool:
        """See `Coordination.is_over`."""
        return self._is_over or self._state.epoch >= self._state.arguments.epochs

    def begin_epoch(self) -> bool:
        """See `Coordination.begin_epoch`."""
        self._enters_mid_epoch = self._state.batches is not None
        if self._recovery is not None and not self._enters_mid_epoch:
            self._recovery.adapt_if_changed()
        return not self._enters_mid_epoch

    @contextmanager
    def epoch_batches(self) -> Iterator[None]:
        """See `Coordination.epoch_batches`."""
        state, stepper, engine = self._state, self._state.stepper, self._replica_model.engine
        set_mode(self._replica_model.model, training=True)
        if state.batches is None:
            self._replica_model.agree_on_learning_rate(self._retry)
            self._replica_model.probes.begin_epoch(engine)
            if self._recovery is not None:
                self._recovery.adapt_if_changed()  # the tests may have met a membership change
            # A callback may have stopped in `on_epoch_begin`. Keras takes one group of steps, and then checks.
            state.stop_requested = self._any_stops()
            state.batches = JointBatches(state.source, state.epoch, self._replica)
            engine.begin()
        batches = state.batches
        stepper.begin(has_batch_listeners=state.has_batch_listeners, entering=self._enters_mid_epoch)
        self._sync_between_steps()
        # If each step is merged, members join in the merge, after the decisions that precede it; otherwise before them.
        self._enters_mid_epoch = self._enters_mid_epoch and stepper.merges_every_step
        try:
            yield
            # Not after an exception: the ranks may be at different steps, and must not wait for each other.
            if batches.done % self.steps_per_group:  # else `end_group` was called after the last step
                self._stops_within_epoch()
            self._recorder.record_merge(stepper.finish(self._retry))
            set_mode(self._replica_model.model, training=False)
        finally:
            batches.close()
            state.batches = None
            engine.end()
            timeline.current.leave()
        self._is_empty_epoch = batches.done == 0

    def next_batch(self) -> JointBatch | None:
        """See `Coordination.next_batch`."""
        if self._recovery is not None:
            return self._recovery.next_batch()
        assert self._state.batches is not None
        return self._state.batches.next()

    def begin_group(self) -> None:
        """See `Coordination.begin_group`."""
        entering, self._enters_mid_epoch = self._enters_mid_epoch, False
        # For a process that joins here, the others have already agreed.
        if entering or not (self._state.has_batch_listeners and self._state.stepper.is_merged):
            return
        engine = self._replica_model.engine
        if self._retry(lambda: self._replica.any(engine.variables_are_current)):
            engine.end()
            self._replica_model.agree_on_learning_rate(self._retry)
            engine.begin()

    def train_step(self, batch: JointBatch) -> JointBatch:
        """See `Coordination.train_step`."""
        state, stepper, checkpointing = self._state, self._state.stepper, self._checkpointing
        step = batch.step
        # If callbacks have ended an epoch before its first step, any step may be the last one.
        last = state.stop_requested or state.is_last(step)
        engine, structure = self._replica_model.engine, state.source.structure
        if not self._has_trained and stepper.merges_every_step:
            self._replica_model.probes.examine(engine, "train_step", batch.data, structure)
        engine.set_batch_structure(structure)  # an evaluation in between may have used another structure
        progress.report("gradients", epoch=state.epoch, step=step)
        if checkpointing is not None and stepper.merges_every_step:
            checkpointing.announce(steps=1)
        timeline.current.enter("forward/backward", epoch=state.epoch, step=step)
        with nullcontext() if self._has_trained else annotate_size_errors(batch.data, self._replica.world_size):
            if self._recovery is not None:
                boundary = step % self.steps_per_group == 0
                batch = self._recovery.train_step(batch, last=last, boundary=boundary)
            else:
                stepper.train(batch, last=last)
        timeline.current.leave()
        assert state.batches is not None
        # Before anything else: from here on, a membership change must not repeat this step.
        state.batches.done = step + 1
        self._has_trained = True
        self._recorder.record_step(batch)
        self._recorder.record_merge(stepper.merge_if_due(self._retry))
        return batch

    def end_group(self, step: int) -> bool:
        """See `Coordination.end_group`."""
        if self._stops_within_epoch():
            return True
        # Between two groups all ranks have the same state, so checkpoints are taken and members join here.
        if self._checkpointing is not None:
            self._checkpointing.save_if_due()
        if not self._state.is_last(step):
            self._sync_between_steps()
        return False

    def epoch_logs(self) -> dict[str, Any]:
        """See `Coordination.epoch_logs`."""
        self._recorder.end_epoch()
        if self._is_empty_epoch:
            return logs_of_empty_epoch(self._model, self._step_logs)
        # A process that resumed after an epoch's last step has only the metrics. For its own steps, Keras logs the
        # current metrics: a callback may have evaluated since the last step.
        is_watched = self._state.has_batch_listeners and not logs_differ_from_metrics(self._model, "train_step")
        takes_results = is_watched or not self._has_trained
        logs = self._model.get_metrics_result() if takes_results else self._state.stepper.logs()
        self._step_logs = plain_logs(logs)
        return dict(self._step_logs)

    def evaluate(self) -> dict[str, Any]:
        """See `Coordination.evaluate`."""
        state = self._state

        def evaluate(callbacks: Any) -> dict[str, Any]:
            assert state.validation is not None
            return evaluate_on_replicas(
                self._replica_model,
                state.validation,
                callbacks,
                has_batch_listeners=state.has_validation_batch_listeners,
                on_change=None if self._recovery is None else self._recovery.adapt,
            )

        if not overrides(self._model, "evaluate"):
            return evaluate(state.callbacks)
        self._replica_model.validation = evaluate
        try:
            return evaluate_by_program(
                self._model.evaluate, state.arguments, state.callbacks, _use_cached_eval_dataset=True
            )
        finally:
            self._replica_model.validation = None

    def merge_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """See `Coordination.merge_logs`. The logs are already merged."""
        return logs

    def end_epoch(self) -> None:
        """See `Coordination.end_epoch`."""
        state, model, recovery = self._state, self._model, self._recovery
        if state.chief_adds_logs:
            self._adopt_chief_history()
        # Members that get here have run `on_epoch_end`. If the chief is lost instead, it is unknown whether it did, so
        # its successor runs it again.
        if recovery is not None:
            recovery.ends_epoch = True
        model.stop_training = self._any_stops()
        if recovery is not None:
            recovery.ends_epoch = False
            recovery.share_chief_callbacks()
        state.epoch += 1
        if self._checkpointing is not None:
            self._checkpointing.save_if_due(ends_epoch=True)
        self._is_over = bool(model.stop_training)

    @contextmanager
    def end(self) -> Iterator[None]:
        """See `Coordination.end`."""
        state, model = self._state, self._model
        state.stepper.end(self._retry)
        if self._checkpointing is not None:
            self._checkpointing.finish()
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and state.arguments.epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        yield

    # Internals.

    def _any_stops(self) -> bool:
        """Whether a callback of any rank has set `stop_training`."""
        return self._retry(lambda: self._replica.any(self._model.stop_training))

    def _stops_within_epoch(self) -> bool:
        """After a group of steps, return whether the epoch stops; if so, callbacks of all ranks see it."""
        state = self._state
        stops = state.stepper.is_merged and (state.stop_requested or (state.has_batch_listeners and self._any_stops()))
        if stops:
            self._model.stop_training = True
        return stops

    def _sync_between_steps(self) -> None:
        """If steps are not merged, do what their merge does otherwise: admit members, agree whether to save or stop."""
        stepper, recovery, checkpointing = self._state.stepper, self._recovery, self._checkpointing
        if stepper.merges_every_step or not stepper.is_merged or (recovery is None and checkpointing is None):
            return

        def sync() -> None:
            if checkpointing is not None:
                checkpointing.announce()
            if self._replica.elastic is not None:
                self._replica.elastic.join_points.at_boundary = True
            self._replica_model.merge.merge_notice()

        self._retry(sync)
        if checkpointing is not None:
            checkpointing.save_if_due()

    def _adopt_chief_history(self) -> None:
        """Adopt what callbacks that run only on the chief have added to the logs of the finished epoch."""
        history = self._model.history.history
        own = encode({name: [len(values), as_plain_value(values[-1])] for name, values in history.items()})
        chiefs = self._retry(lambda: self._replica.communicator.broadcast_bytes(own))
        for name, (count, newest) in decode(chiefs).items():
            history.setdefault(name, [])[count - 1 :] = [newest]
