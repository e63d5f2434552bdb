"""A Keras optimizer without its model: it updates variables, or shards of them, from received gradients.

This is what a parameter server computes. The optimizer is rebuilt from its Keras config, with its schedule, weight
decay, clipping, averages and accumulation. Only clipping by norm needs all shards at once: with several servers, the
workers do it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.keras_compat.variables.optimizer_slots import OptimizerSlot, build_and_record_slots, set_decaying

Array = np.ndarray[Any, Any]

_WHOLE_VARIABLE_OPTIMIZERS = ("Lamb", "Muon")
"""Optimizers whose updates depend on a variable as a whole: on its norm, or its rows and columns."""


class UpdaterPiece(NamedTuple):
    """A variable, or some rows of it.

    Attributes:
        path: Keras path of the variable.
        value: Initial value.
        constraint: Keras config of the variable's constraint, as JSON; None if it has none.
        decays: Whether weight decay applies to it.
    """

    path: str
    value: Array
    constraint: str | None
    decays: bool


class Updater(ABC):
    """An optimizer and the pieces that it updates; created by `make_updater`.

    Only one thread may use it at a time.

    Attributes:
        slots: Slot of each of the optimizer's variables.
        shares_buffers: Whether `values` returns the memory that the next update changes, instead of copies.
    """

    slots: tuple[OptimizerSlot, ...]
    shares_buffers = False

    @property
    @abstractmethod
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the pieces in each group. Gradients and values of a group of several are one flat buffer."""

    @abstractmethod
    def apply(self, gradients: Sequence[Any]) -> None:
        """Update once with the gradients of the groups. They must not change until a value is fetched."""

    @abstractmethod
    def values(self) -> list[Array]:
        """Return the current values of the groups."""

    @abstractmethod
    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate from now on. No effect on a schedule."""

    @abstractmethod
    def load(self, values: Mapping[int, Array], state: Mapping[int, Array]) -> None:
        """Set the values of some pieces and of some of the optimizer's variables, by index."""

    @abstractmethod
    def fetch(self, values: Sequence[int], state: Sequence[int]) -> tuple[list[Array], list[Array]]:
        """Return the values of some pieces and of some optimizer variables. Read them before the next update."""

    def optimizer_values(self) -> list[Array]:
        """Return the values of the optimizer's variables, in the order of `slots`."""
        return [np.array(value) for value in self.fetch((), range(len(self.slots)))[1]]

    def load_optimizer(self, values: Sequence[Array]) -> None:
        """Set the values of the optimizer's variables, in the order of `slots`."""
        self.load({}, dict(enumerate(values)))

    def count(self, updates: int) -> None:
        """Count updates that were made elsewhere."""
        # Keras's name for `optimizer._iterations`.
        place = self.slots.index(OptimizerSlot(-1, "iteration"))
        (made,) = self.fetch((), (place,))[1]
        self.load({}, {place: np.asarray(made + updates)})


class BackendUpdater(Updater):
    """An updater that computes on the backend of this process."""

    def __init__(self, optimizer: str, pieces: Sequence[UpdaterPiece]) -> None:
        self.variables = [_variable(piece) for piece in pieces]
        # `keras.optimizers.deserialize` does not know all of Keras's own optimizers (Lamb).
        self.optimizer = _create_optimizer(json.loads(optimizer))
        set_decaying(self.optimizer, [piece.decays for piece in pieces], self.variables)
        self.slots = build_and_record_slots(self.optimizer, self.variables)
        self._prepare()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple((number,) for number in range(len(self.variables)))

    def _prepare(self) -> None:
        """Prepare for the first update on this backend."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate from now on. No effect on a schedule."""
        if isinstance(self.optimizer._learning_rate, keras.Variable):
            self.optimizer.learning_rate = rate


def clips_by_norm(optimizer: Any) -> bool:
    """Whether an update depends on the norm of gradients."""
    return optimizer.clipnorm is not None or optimizer.global_clipnorm is not None


def check_kind(optimizer: Any) -> None:
    """Raise UnsupportedError for an optimizer that cannot run on servers, however many there are."""
    name = type(optimizer).__name__
    rate = getattr(optimizer, "_learning_rate", None)
    if callable(rate) and not isinstance(rate, (keras.Variable, keras.optimizers.schedules.LearningRateSchedule)):
        raise UnsupportedError(
            f"{name} got a function as its learning rate, which servers cannot call. Write a "
            f"keras.optimizers.schedules.LearningRateSchedule, whose `step` is the job's global step, or set it in "
            f"a callback."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor:
        raise UnsupportedError(
            f"{name} scales the loss, and with parameter servers no process sees all gradients in time for that. "
            f"Use the policy 'mixed_bfloat16', which needs no loss scaling, or float32."
        )
    if isinstance(optimizer, keras.optimizers.Adafactor):
        raise UnsupportedError(
            "Adafactor does not record which of its variables belongs to which of the model's, so servers cannot keep "
            "its state. Use another optimizer."
        )
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):  # not in the oldest Keras
        raise UnsupportedError(
            "MultiOptimizer hides which optimizer updates which variable, so each of several servers would clip by the "
            "norm of its own gradients, and none would see a learning rate that changes. Use one optimizer for all "
            "variables, or MultiWorkerMirroredStrategy."
        )


def check_optimizer(optimizer: Any, *, is_sharded: bool, is_on_one_server: bool, is_partial: bool = False) -> None:
    """Raise UnsupportedError for an optimizer that cannot run on servers, or not on this many.

    Args:
        optimizer: A Keras optimizer.
        is_sharded: Whether a variable has more than one shard.
        is_on_one_server: Whether one server has all variables, undivided, and so sees every norm itself.
        is_partial: Whether an update may lack some workers' gradients.
    """
    check_kind(optimizer)
    name = type(optimizer).__name__
    if clips_by_norm(optimizer) and not is_on_one_server and (is_partial or optimizer.gradient_accumulation_steps):
        raise UnsupportedError(
            f"{name} clips by the norm of {'the first' if is_partial else 'accumulated'} gradients, of which each of "
            f"several servers sees a part only. Use one server and no variable_partitioner, clipvalue, or leave out "
            f"{'replicas_to_aggregate' if is_partial else 'gradient_accumulation_steps'}."
        )
    if is_sharded and any(kind.__name__ in _WHOLE_VARIABLE_OPTIMIZERS for kind in type(optimizer).__mro__):
        raise UnsupportedError(
            f"{name} computes with each variable as a whole, so its variables cannot be partitioned. Leave out "
            f"variable_partitioner, or choose another optimizer."
        )


def row_update_obstacle(optimizer: Any, slots: Sequence[OptimizerSlot], variable: int, shape: Sequence[int]) -> str:
    """Return why an optimizer cannot update single rows of a variable, or "" if it can.

    Args:
        optimizer: A built Keras optimizer.
        slots: Slots of the optimizer's variables; see `slots_of_model`.
        variable: Index of the variable.
        shape: Shape of the variable.
    """
    name = type(optimizer).__name__
    if name in _WHOLE_VARIABLE_OPTIMIZERS:
        return f"{name} computes with a variable as a whole"
    if optimizer.use_ema:
        return f"{name} averages weights (use_ema), those of all rows at every step"
    if optimizer.gradient_accumulation_steps:
        return f"{name} accumulates gradients over several steps"
    own = [v for v, slot in zip(optimizer.variables, slots, strict=True) if slot.variable == variable]
    if any(tuple(v.shape) != tuple(shape) for v in own):
        return f"{name} keeps more for it than a value for each weight"
    return ""


def clip_gradients(optimizer: Any, gradients: Sequence[Array]) -> list[Array]:
    """Clip gradients by norm as the optimizer would if it saw all of them. Clipping by value is left to it."""
    if optimizer.global_clipnorm is not None:
        # The squares of each gradient are summed in its own dtype, the sums of all gradients in float64.
        norm = float(np.sqrt(sum(float(np.vdot(g, g)) for g in gradients)))
        if norm > optimizer.global_clipnorm:
            return [gradient * gradient.dtype.type(optimizer.global_clipnorm / norm) for gradient in gradients]
    elif optimizer.clipnorm is not None:
        norms = [float(np.linalg.norm(gradient)) for gradient in gradients]
        limit = optimizer.clipnorm
        return [g * g.dtype.type(limit / norm) if norm > limit else g for g, norm in zip(gradients, norms, strict=True)]
    return list(gradients)


def _create_optimizer(described: dict[str, Any]) -> Any:
    try:
        return keras.saving.deserialize_keras_object(described)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The servers cannot create the chief's optimizer {described.get('class_name')!r}: they do not know one of "
            f"its classes. Register custom classes (optimizers, schedules, constraints) with "
            f"@keras.saving.register_keras_serializable() before you create the strategy: on a server the program does "
            f"not run past that point. ({str(error).strip().splitlines()[0]})"
        ) from error


def _variable(piece: UpdaterPiece) -> Any:
    constraint = None if piece.constraint is None else keras.constraints.deserialize(json.loads(piece.constraint))
    variable = keras.Variable(
        np.array(piece.value), dtype=str(piece.value.dtype), name=piece.path.rpartition("/")[2] or "variable"
    )
    variable._path = piece.path  # some optimizers choose variables by path
    variable.constraint = constraint
    return variable
