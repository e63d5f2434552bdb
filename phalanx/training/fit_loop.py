"""The loop of `fit`: epochs, batches, validation, stopping and history, the same for every kind of job.

The path of one training step:

    coordination.next_batch      this process's part of the next global batch
    on_train_batch_begin
    coordination.begin_group     agree on what callbacks have changed
    coordination.train_step      -> stepper.train: gradients, merge, update
    on_train_batch_end
    coordination.end_group       agree on stopping; save; admit new members

The collaborators (`fit_coordination`, `steps/`, `elastic_recovery`, `fit_resumption`) determine how the processes
agree, what a step does and how a lost process is replaced; the loop itself knows neither ranks nor servers.
"""

from __future__ import annotations

from typing import Any

from phalanx.errors import UnsupportedError
from phalanx.monitoring import timeline
from phalanx.runtime import telemetry
from phalanx.training.fit_coordination import Coordination
from phalanx.training.fit_state import FitState


class FitLoop:
    """Loop of one training, like `keras.Model.fit`.

    Args:
        model: The compiled Keras model.
        state: State of this `fit`, with its stepper and callbacks.
        coordination: Coordinates the processes of the job.
    """

    def __init__(self, model: Any, state: FitState, coordination: Coordination[Any]) -> None:
        self._model = model
        self._state = state
        self._coordination = coordination
        self._compiled_with = model._loss_tracker  # `compile` creates a new one

    def run(self) -> Any:
        """Train; return the `History`."""
        model, state, coordination = self._model, self._state, self._coordination
        model.stop_training = False
        telemetry.current.total_epochs = state.arguments.epochs
        coordination.begin()
        while not coordination.is_over():
            self._run_epoch()
        with coordination.end():
            state.callbacks.on_train_end(logs=state.logs)
        return model.history

    def _run_epoch(self) -> None:
        """Train and validate for one epoch, or for the rest of it."""
        model, state, coordination = self._model, self._state, self._coordination
        epoch = state.epoch
        if coordination.begin_epoch():
            model.reset_metrics()
            state.callbacks.on_epoch_begin(epoch)
        # The coordination makes all decisions: an `if` on what one process sees would make the others wait forever.
        with coordination.epoch_batches():
            self._train_batches()
            self._check_compilation()
        logs = coordination.epoch_logs()
        if logs is None:
            return
        if self._validates(epoch):
            validation = coordination.evaluate()
            if validation is None:
                return
            logs |= {f"val_{name}": value for name, value in validation.items()}
        if (merged := coordination.merge_logs(logs)) is not None:
            state.logs = merged
            telemetry.current.record_epoch(epoch, merged)
            timeline.current.enter("callbacks", epoch=epoch)
            state.callbacks.on_epoch_end(epoch, merged)
            timeline.current.leave()
        coordination.end_epoch()

    def _train_batches(self) -> None:
        """Take the steps of one epoch, in groups of `steps_per_group`."""
        # `state.callbacks` is read again at each use, because a process that becomes chief gets new ones.
        state, coordination, figures = self._state, self._coordination, telemetry.current
        size = coordination.steps_per_group
        step = -1
        while (batch := coordination.next_batch()) is not None:
            step = batch.step
            if step % size == 0:
                if state.has_batch_hooks:
                    timeline.current.enter("callbacks")
                    state.callbacks.on_train_batch_begin(step)
                    timeline.current.leave()
                self._check_compilation()
                coordination.begin_group()
            batch = coordination.train_step(batch)
            figures.samples += batch.size
            # Each process decides by its own clock: `logs` of a stepper runs no collective.
            if figures.are_logs_due:
                figures.record_logs(state.stepper.logs())
            # Before the hooks, because the progress bar is one of them and shows the samples of this batch, too.
            if state.progress_bar is not None:
                state.progress_bar.count(batch.global_size)
            if (step + 1) % size == 0:
                self._end_batches(step)
                # All processes leave the loop at the same step, or one would wait in the next merge.
                if coordination.end_group(step):
                    return
        if (step + 1) % size:  # Keras also reports the last step of a full group
            self._end_batches(step - step % size + size - 1)

    def _check_compilation(self) -> None:
        """Raise UnsupportedError if a callback has compiled the model: steps and logs still use the previous parts."""
        if self._model._loss_tracker is not self._compiled_with:
            raise UnsupportedError(
                f"{self._model.name!r} was compiled in the middle of fit(), which trains what was compiled before. Set "
                f"model.stop_training, compile when fit() has returned, and call fit() again, with initial_epoch."
            )

    def _end_batches(self, step: int) -> None:
        state = self._state
        if state.has_batch_hooks:
            timeline.current.enter("callbacks")
            state.callbacks.on_train_batch_end(step, state.stepper.logs())
            timeline.current.leave()

    def _validates(self, epoch: int) -> bool:
        arguments = self._state.arguments
        return arguments.validation_data is not None and self._model._should_eval(epoch, arguments.validation_freq)
