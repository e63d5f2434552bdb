"""Jobs whose members come and go, for Keras on every backend. Names and meaning are Horovod's.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        state.model.fit(x, y, steps_per_epoch=100, epochs=10 - state.epoch, callbacks=[
            hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ])

The callbacks may stand in any order: before a commit, batch and epoch are brought up to date.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from phalanx.errors import ConfigurationError
from phalanx.horovod.elastic import ObjectState, State, run
from phalanx.horovod.keras.functions import broadcast_variables
from phalanx.horovod.operation_request import Array
from phalanx.keras_compat.model_state import sync_jax_state
from phalanx.training.state_sync import variables_of


class KerasState(ObjectState):
    """The state of a Keras program: weights, layer state, optimizer, and values by name (`epoch=0, batch=0`).

    States of random generators stay each rank's own.

    Args:
        model: must be built.
        optimizer: one that is not the model's own.
        backend: means nothing here.
        kwargs: values, as for `ObjectState`.

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
        self._keep()

    def save(self) -> None:
        """See `State.save`. It copies the model; call it every few batches where that takes long."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """See `State.restore`."""
        sync_jax_state(self.model)
        for variable, array in zip(self._variables(), self._saved, strict=True):
            variable.assign(array)
        super().restore()

    def sync(self) -> None:
        """See `State.sync`."""
        sync_jax_state(self.model)
        broadcast_variables([v for v in self._variables() if "seed_generator_state" not in v.path], 0)
        super().sync()
        self._keep()

    def _keep(self) -> None:
        sync_jax_state(self.model)
        self._saved: list[Array] = [np.array(keras.ops.convert_to_numpy(v.value)) for v in self._variables()]

    def _variables(self) -> list[Any]:
        found = {id(variable): variable for variable in variables_of(self.model)}
        found |= {id(variable): variable for variable in getattr(self.optimizer, "variables", ())}
        return list(found.values())


class _Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps a value of the state up to date; a commit asks for it first (`tell`)."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        told = vars(self.state).setdefault("_progress", [])
        told[:] = [*(each for each in told if type(each) is not type(self)), self]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.tell(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.tell(None)

    def tell(self, batch: int | None) -> None:
        """Write down that this batch of the epoch is over, or, without one, the epoch. Twice is as good as once."""
        raise NotImplementedError


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state after every so many batches, and at the end of each epoch.

    Args:
        state: a `State`.
        batches_per_commit: what is lost with a member is no more than this.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining = self.batches_per_commit  # the same on members that come later

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining <= 0:
            self.batches_remaining = self.batches_per_commit
            self._commit(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._commit(None)

    def _commit(self, batch: int | None) -> None:
        for progress in vars(self.state).get("_progress", ()):
            progress.tell(batch)
        self.state.commit()


class UpdateBatchStateCallback(_Progress):
    """`state.batch` is the number of batches of the epoch that are over; 0 between epochs.

    The first epoch of a `fit` that goes on is shorter by as many batches, where Keras knows how many an epoch has
    (Horovod: only the progress bar's). The data of that epoch should then begin behind them. With `steps_per_epoch` the
    data must go on from one epoch to the next, as a repeated dataset does.

    Args:
        state: has a value `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._before = 0
        self._steps: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._before = self.state.batch
        self._steps = (self.params or {}).get("steps")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_end(batch, logs)
        if self._before and self._steps and self.state.batch >= self._steps and not self.model.stop_training:
            self.model.stop_training = _EPOCH_IS_OVER

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.model.stop_training is _EPOCH_IS_OVER:
            self.model.stop_training = False

    def tell(self, batch: int | None) -> None:
        if batch is None:
            self._before = 0
        self.state.batch = 0 if batch is None else self._before + batch + 1


class UpdateEpochStateCallback(_Progress):
    """`state.epoch` is the number of epochs that are over.

    Args:
        state: has a value `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._before = 0
        self._begun = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._before, self._begun = self.state.epoch, 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begun += 1

    def tell(self, batch: int | None) -> None:
        if batch is None:
            self.state.epoch = self._before + self._begun


class _EpochIsOver:
    """In the place of True as a model's `stop_training`: Keras ends the batches of the epoch, and this is taken back
    before it looks whether to end the epochs. Who else wants the training to end writes True over it."""


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
