"""Elastic training with Keras on every backend. Names and semantics are Horovod's.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        state.model.fit(x, y, steps_per_epoch=100, epochs=10 - state.epoch, callbacks=[
            hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ])

The callbacks can be listed in any order: batch and epoch are updated before a commit.
"""

from __future__ import annotations

from typing import Any

import keras

from phalanx.errors import ConfigurationError
from phalanx.horovod.elastic import ObjectState, State, run
from phalanx.horovod.keras.keras_functions import broadcast_variables
from phalanx.horovod.operation_request import Array
from phalanx.keras_compat.model_state import sync_jax_state
from phalanx.keras_compat.variables.host_values import host_copy
from phalanx.training.state_sync import variables_of


class KerasState(ObjectState):
    """The state of a Keras program: weights, layer state, optimizer, and values by name (`epoch=0, batch=0`).

    The states of random generators stay different on each rank.

    Args:
        model: A built model.
        optimizer: The optimizer, if it is not the model's.
        backend: Ignored.
        kwargs: Values, as in `ObjectState`.

    Raises: ConfigurationError if the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any):
        if not model.built:
            raise ConfigurationError("The model must be built first: call model.build(input_shape), or name its Input.")
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)
        self._snapshot()

    def save(self) -> None:
        """See `State.save`. It copies the model; if that is slow, save only every few batches."""
        self._snapshot()
        super().save()

    def restore(self) -> None:
        """See `State.restore`."""
        self._restore_snapshot()
        super().restore()

    def on_reset(self) -> None:
        """See `State.on_reset`."""
        # An exception has ended `fit`. On JAX, Keras then overwrites the weights with the averages of `use_ema`. The
        # saved weights are from before that.
        self._restore_snapshot()
        super().on_reset()

    def sync(self) -> None:
        """See `State.sync`."""
        sync_jax_state(self.model)
        broadcast_variables([v for v in self._variables() if "seed_generator_state" not in v.path], 0)
        super().sync()
        self._snapshot()

    def _restore_snapshot(self) -> None:
        sync_jax_state(self.model)
        for variable, array in zip(self._variables(), self._saved, strict=True):
            variable.assign(array)

    def _snapshot(self) -> None:
        sync_jax_state(self.model)
        self._saved: list[Array] = [host_copy(v) for v in self._variables()]

    def _variables(self) -> list[Any]:
        found = {id(variable): variable for variable in variables_of(self.model)}
        found |= {id(variable): variable for variable in getattr(self.optimizer, "variables", ())}
        return list(found.values())


class _StateUpdater(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps a value of the state up to date; a commit updates it first.

    Attributes:
        batches_before: Number of batches of the epoch that were completed before this `fit`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.batches_before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Programs create new callbacks for each `fit`: the newest of each kind counts.
        registered = vars(self.state).setdefault("_updaters", [])
        registered[:] = [*(each for each in registered if type(each) is not type(self)), self]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.update(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.update(None)

    def update(self, batch: int | None) -> None:
        """Update the value after a batch of the epoch, or, with None, after the epoch. Safe to call twice."""
        raise NotImplementedError


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state every few batches, and at the end of each epoch.

    The last batch of an epoch is committed at the end of the epoch: a `fit` could not resume between the two without
    training an extra batch (as Horovod does).

    Args:
        state: A `State`.
        batches_per_commit: Batches between two commits; after the loss of a member, at most these are repeated.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining = self.batches_per_commit  # equal on members that join later

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining <= 0:
            self.batches_remaining = self.batches_per_commit
            if not self._is_last(batch):
                self._commit(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._commit(None)

    def _is_last(self, batch: int) -> bool:
        """Return whether the epoch ends with this batch; False if Keras does not know."""
        steps = (self.params or {}).get("steps")
        before = max((updater.batches_before for updater in self._updaters()), default=0)
        return steps is not None and before + batch + 1 >= steps

    def _commit(self, batch: int | None) -> None:
        for updater in self._updaters():
            updater.update(batch)
        self.state.commit()

    def _updaters(self) -> list[_StateUpdater]:
        registered: list[_StateUpdater] = vars(self.state).get("_updaters", [])
        return registered


class UpdateBatchStateCallback(_StateUpdater):
    """Sets `state.batch` to the number of completed batches of the epoch; 0 between epochs.

    If Keras knows the number of batches in an epoch, the first epoch of a resumed `fit` is shorter by the completed
    batches (in Horovod, only its progress bar is). The data of that epoch should then start after them. With
    `steps_per_epoch`, the data must continue from one epoch to the next, as a repeated dataset does.

    Args:
        state: A state with a value `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._steps: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.batches_before = self.state.batch
        self._steps = (self.params or {}).get("steps")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_end(batch, logs)
        if self.batches_before and self._steps and self.state.batch >= self._steps and not self.model.stop_training:
            self.model.stop_training = _EPOCH_IS_OVER

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.model.stop_training is _EPOCH_IS_OVER:
            self.model.stop_training = False

    def update(self, batch: int | None) -> None:
        if batch is None:
            self.batches_before = 0
        self.state.batch = 0 if batch is None else self.batches_before + batch + 1


class UpdateEpochStateCallback(_StateUpdater):
    """Sets `state.epoch` to the number of completed epochs.

    Args:
        state: A state with a value `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._before = 0  # epochs that were completed before this `fit`
        self._begun = 0  # epochs that this `fit` has started; Keras's numbers depend on `initial_epoch`

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._before, self._begun = self.state.epoch, 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begun += 1

    def update(self, batch: int | None) -> None:
        if batch is None:
            self.state.epoch = self._before + self._begun


class _EpochIsOver:
    """A true value for a model's `stop_training` that ends the epoch, not the training.

    Keras then ends the batches of the epoch; the value is reset before Keras checks whether to stop training. Any other
    callback that stops training overwrites it with True.
    """


_EPOCH_IS_OVER = _EpochIsOver()

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
