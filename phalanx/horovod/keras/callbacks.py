"""Callbacks for Keras's `fit`. Names and semantics are Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from phalanx.errors import ConfigurationError
from phalanx.horovod import basics, operations
from phalanx.horovod.common.process_sets import ProcessSet, global_process_set
from phalanx.horovod.horovod_job import current_job
from phalanx.horovod.keras.keras_functions import broadcast_variables
from phalanx.horovod.operation_request import OperationKind

_MOMENTA = {keras.optimizers.SGD: "momentums", keras.optimizers.RMSprop: "_momentums"}
"""Optimizers whose momenta are sums of steps, which contain the learning rate as a factor, with the attribute that
holds them. The momenta of others (Muon, Adam) are sums of gradients."""


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts the weights and the optimizer state of one rank to all ranks.

    This happens before the first batch (in Horovod, after it), or after it if that batch builds the model. The states
    of random generators stay different on each rank.

    Args:
        root_rank: Rank whose variables are sent.
        device: Ignored.
        local_variables: Variables of the model that are not broadcast.
        process_set: The ranks that train together.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Iterable[Any] = (),
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(variable) for variable in local_variables}
        self.process_set = process_set
        self.broadcast_done = False
        self._generation: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model = self.model
        # A member that has joined an elastic job since then did not take part in the last broadcast.
        generation = current_job().membership.generation
        self.broadcast_done = self.broadcast_done and generation == self._generation
        self._generation = generation
        if model.built:
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        model = self.model
        variables = [v for v in model.variables if "seed_generator_state" not in v.path and id(v) not in self._local]
        if model.optimizer is not None:
            variables += model.optimizer.variables
        broadcast_variables(variables, self.root_rank, self.process_set)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the logs over the ranks at the end of each epoch. List it before callbacks that use the logs.

    Args:
        device: Ignored.
        process_set: The ranks that train together.

    Raises: HorovodInternalError if the ranks log different metrics.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs or not self.process_set.included():
            return
        names = sorted(logs)
        values = [np.asarray(keras.ops.convert_to_numpy(logs[name]), np.float64) for name in names]
        means = operations.run(
            OperationKind.ALLREDUCE,
            values,
            name="metric_average",
            process_set=self.process_set,
            detail=", ".join(names),
        )
        logs.update({name: mean if mean.ndim else float(mean) for name, mean in zip(names, means, strict=True)})


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Multiplies the learning rate `initial_lr` by a factor during some epochs.

    Args:
        initial_lr: Learning rate before multiplication, for the whole job.
        multiplier: A factor that is applied once per epoch since `start_epoch` (`multiplier ** (epoch -
            start_epoch)`), or a function of the epoch, which is fractional without `staircase`.
        start_epoch: First epoch in which the callback acts.
        end_epoch: First epoch in which it no longer acts; None for never.
        staircase: Whether the rate changes only at the start of an epoch; otherwise it changes before each batch.
        momentum_correction: Whether the optimizer's momenta are multiplied by the ratio of the new to the old rate.
        steps_per_epoch: Number of batches in an epoch; needed without `staircase` if Keras does not know it.

    Source of the correction: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 3 (equation 10).
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigurationError("initial_lr is required: the learning rate that the multiplier is applied to.")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.staircase = staircase
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ConfigurationError(
                    f"{type(self).__name__} needs the number of batches in an epoch, which Keras does not know: pass "
                    f"steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase:
            if batch == 0:
                self._set(self.multiplier(self.current_epoch))
        else:
            assert self.steps_per_epoch is not None, "checked at the start"
            self._set(self.multiplier(self.current_epoch + batch / self.steps_per_epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _learning_rate(self.model.optimizer)

    def _set(self, factor: float) -> None:
        # On JAX, Keras's `self.model` first copies the loop's state to the variables, and the next step reads them.
        # Otherwise the assignment below would be lost.
        optimizer = self.model.optimizer
        before, now = _learning_rate(optimizer), self.initial_lr * factor
        if now == before:
            return
        optimizer.learning_rate = now
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum_correction and before:
            found = (getattr(inner, name, ()) for kind, name in _MOMENTA.items() if isinstance(inner, kind))
            for momentum in next(found, ()):
                momentum.assign(momentum * (now / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` in the first epochs, batch by batch.

    Args:
        initial_lr: Learning rate of the whole job: the rate of one process times the number of processes.
        warmup_epochs: Number of epochs in which it grows.
        momentum_correction: See `LearningRateScheduleCallback`.
        steps_per_epoch: See `LearningRateScheduleCallback`.
        verbose: 1 to print a line on rank 0 at the end.

    Source: Goyal et al. 2017, section 2.2 ("gradual warmup").
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # The full rate is reached at the end of the last batch, not at its start.
            reached = epoch + 1.0 / (self.steps_per_epoch or 1)
            size = basics.size()
            return 1.0 / size * (reached * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and basics.rank() == 0:
            rate = _learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras's `ModelCheckpoint` for the best model. The program sets the attribute `filepath` before `fit`.

        best = hvd.callbacks.BestModelCheckpoint(monitor="val_accuracy")
        best.filepath = "best.keras"
        model.fit(x, y, callbacks=[best] if hvd.rank() == 0 else [])

    Args:
        monitor: See `ModelCheckpoint`.
        verbose: See `ModelCheckpoint`.
        mode: See `ModelCheckpoint`.
        save_freq: See `ModelCheckpoint`.

    Raises: ConfigurationError in `fit` if `filepath` is not set.
    """

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: str | int = "epoch"
    ) -> None:
        # Keras requires a path.
        super().__init__("unset.keras", monitor, verbose, save_best_only=True, mode=mode, save_freq=save_freq)
        self.filepath = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.filepath is None:
            raise ConfigurationError(
                "BestModelCheckpoint does not know where to save: set its filepath before fit(), "
                "`callback.filepath = 'best.keras'`."
            )
        super().on_train_begin(logs)


def _learning_rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
