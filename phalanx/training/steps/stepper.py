"""When the replicas come together: at every step, at every update, or (`periodic`) every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import keras

from phalanx.compression.base_compression import State
from phalanx.engines.engine import Engine
from phalanx.keras_compat import model_state
from phalanx.training import state_sync
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.steps.gradient_merge import MergeMode, StepMerge

T = TypeVar("T")


class RetryOnMembershipChange(Protocol):
    """See `Replica.steadily`."""

    def __call__(self, action: Callable[[], T], /) -> T: ...


class Stepper(Protocol):
    """Takes the training steps of one model, epoch after epoch."""

    @property
    def every_step(self) -> bool:
        """Whether each step is one of all replicas, which is done by all or by none."""
        ...

    @property
    def together(self) -> bool:
        """Whether the replicas have met at the last step, so that decisions may be taken together now."""
        ...

    def begin(self, *, watched: bool, entering: bool) -> None:
        """An epoch begins; the engine has begun.

        Args:
            watched: whether the logs of single batches matter to anybody.
            entering: this process comes in in the middle of it.
        """
        ...

    def train(self, batch: JointBatch, *, last: bool | None) -> None:
        """One step.

        Args:
            last: whether it is the epoch's last; None where nobody knows.
        """
        ...

    def meet(self, steadily: RetryOnMembershipChange) -> Sequence[str]:
        """A step is over: come together if it is time to. The tasks whose own steps are everybody's now."""
        ...

    def finish(self, steadily: RetryOnMembershipChange) -> Sequence[str]:
        """The epoch's steps are done, and the engine has not ended yet: afterwards all replicas are alike. Returns what
        `meet` does."""
        ...

    def logs(self) -> Mapping[str, Any]:
        """The logs of the epoch until now."""
        ...

    def end(self, steadily: RetryOnMembershipChange) -> None:
        """`fit` has made its last step, and the engine has ended."""
        ...

    def welcome(self) -> None:
        """While the replicas are together and the engine has ended: give those who come in what the others have. All
        ranks must call."""
        ...

    def pooled(self) -> State:
        """While they are together: what the replicas remember beside the model, as one. All ranks must call."""
        ...

    def load_pooled(self, state: State) -> None:
        """Go on from what `pooled` returned; the model has the values of then already."""
        ...


class EveryStep:
    """All replicas take each step together. Gradients that the optimizer accumulates are merged when it updates.

    Args:
        holds: whether a replica may keep them until then; else they are merged at every step.
    """

    together = every_step = True

    def __init__(self, model: Any, engine: Engine, merge: StepMerge, replica: Replica, *, holds: bool = True) -> None:
        self._model = model
        self._engine = engine
        self._merge = merge
        self._replica = replica
        optimizer = model.optimizer
        self._scale = loss_scale(optimizer)
        inner = inner_optimizer(optimizer)
        self._steps = steps_to_hold(model) if holds else 1
        self._iterations = getattr(inner, "_iterations", None)
        self._accumulators = list(getattr(inner, "_accumulated_gradients", ())) if self._steps > 1 else []
        self._watched = False

    def begin(self, *, watched: bool, entering: bool = False) -> None:
        """See `Stepper.begin`."""
        self._watched = watched
        self._merge.forget_counts()

    def train(self, batch: JointBatch, *, last: bool | None) -> None:
        """See `Stepper.train`."""
        if self._scale is not None and self._merge.separate:
            self._merge.unit = float(self._engine.read([self._scale])[0])
        with self._merge.doing(self._mode(last)):
            self._engine.train(batch.data, batch.share)

    def meet(self, steadily: RetryOnMembershipChange) -> Sequence[str]:
        """See `Stepper.meet`."""
        return ()

    def finish(self, steadily: RetryOnMembershipChange) -> Sequence[str]:
        """See `Stepper.finish`. What is held goes to where the optimizer accumulates, so that it can be saved."""
        if not self._accumulators:
            return ()
        held = self._merge.merged_held([tuple(variable.shape) for variable in self._accumulators])
        if held:
            sums = [a + b.astype(a.dtype) for a, b in zip(self._engine.read(self._accumulators), held, strict=True)]
            self._engine.write(list(zip(self._accumulators, sums, strict=True)))
        return ()

    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""
        return self._engine.logs()

    def end(self, steadily: RetryOnMembershipChange) -> None:
        """See `Stepper.end`."""

    def welcome(self) -> None:
        """See `Stepper.welcome`."""
        state_sync.synchronise(self._model, self._replica, metrics=True)
        self._merge.synchronise()

    def pooled(self) -> State:
        """See `Stepper.pooled`."""
        return self._merge.pooled()

    def load_pooled(self, state: State) -> None:
        """See `Stepper.load_pooled`."""
        self._merge.load_pooled(state)

    def _mode(self, last: bool | None) -> MergeMode:
        if self._steps == 1:
            return MergeMode.UPDATE
        made = int(self._engine.read([self._iterations])[0])
        if (made + 1) % self._steps == 0:
            return MergeMode.UPDATE
        return MergeMode.HELD if last is False and not self._watched else MergeMode.GRADIENTS_HELD


def steps_to_hold(model: Any) -> int:
    """Over how many steps a replica may keep gradients of this model, which its optimizer accumulates, to itself."""
    optimizer = getattr(model, "optimizer", None)  # none before `compile`
    # Two optimizers may accumulate over different steps; a `train_step` of one's own may apply more than once. An
    # overflow leaves out the one step in which it is: with a scale that moves, gradients must be seen merged then.
    simple = (
        optimizer is not None
        and len(model_state.optimizers(model)) == 1
        and takes_keras_steps(model)
        and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    )
    return (getattr(optimizer, "gradient_accumulation_steps", None) or 1) if simple else 1


def unit_of_gradients(model: Any) -> float:
    """By what the loss is always multiplied; see `loss_scale` where that moves."""
    optimizer = inner_optimizer(getattr(model, "optimizer", None))
    return float(getattr(optimizer, "loss_scale_factor", None) or 1.0)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside those that scale the loss."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def count_steps(optimizer: Any, steps: int) -> None:
    """So many steps count as made: batches, also where the gradients of several make an update (`iterations` counts the
    updates then, and cannot be assigned)."""
    inner_optimizer(optimizer)._iterations.assign(steps)


def loss_scale(optimizer: Any) -> Any:
    """The variable by which the loss is multiplied; None where it is not, or always by the same number."""
    return optimizer.dynamic_scale if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None


def takes_keras_steps(model: Any) -> bool:
    """Whether the model's `train_step` is Keras's own on the present backend."""
    trainer = next(base for base in keras.Model.__mro__ if "train_step" in vars(base) and base is not keras.Model)
    return bool(type(model).train_step is trainer.train_step)
