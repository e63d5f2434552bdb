"""Steppers, which take the training steps, and the one that merges every step over the replicas."""

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
    """See `Replica.retry`."""

    def __call__(self, action: Callable[[], T], /) -> T: ...


class Stepper(Protocol):
    """Takes the training steps of one model: the seam between the loop and what computes.

    It does not say what a step consists of: engine and merge (`SynchronousStepper`), parameter servers
    (`ParameterServerStepper`), or a single program that is compiled for many devices.
    """

    def train(self, batch: Any, *, last: bool | None = None) -> None:
        """One step on a `TrainingBatch`.

        Args:
            last: whether it is the epoch's last; None where that is not known.
        """

    def logs(self) -> Mapping[str, Any]:
        """The logs of the epoch until now."""


class ReplicaStepper(Stepper, Protocol):
    """Takes the steps of a model that several ranks train, epoch after epoch."""

    @property
    def merges_every_step(self) -> bool:
        """Whether each step is one of all replicas, which happens on all or on none."""

    @property
    def is_merged(self) -> bool:
        """Whether the replicas met at the last step, so that decisions may be taken together now."""

    def begin(self, *, watched: bool, entering: bool) -> None:
        """An epoch begins; the engine has begun.

        Args:
            watched: whether callbacks of any rank see the logs of single batches.
            entering: whether this process joins or resumes in the middle of the epoch.
        """

    def merge_if_due(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """A step is over: merge if it is time to. Returns the tasks whose unmerged steps have been merged."""

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """The epoch's steps are done, and the engine has not ended yet: afterwards all replicas are alike. Returns what
        `merge_if_due` does."""

    def end(self, retry: RetryOnMembershipChange) -> None:
        """`fit` has taken its last step, and the engine has ended."""

    def admit(self) -> None:
        """While the replicas are merged and the engine has ended: give those who join what the others have. All ranks
        must call."""

    def pooled(self) -> State:
        """While they are merged: what the replicas keep besides the model, pooled. All ranks must call."""

    def load_pooled(self, state: State) -> None:
        """Continue from what `pooled` returned; the model has the values of then already."""


class SynchronousStepper:
    """All replicas take each step together. Gradients that the optimizer accumulates are merged when it updates.

    Args:
        accumulates: whether a replica may keep its gradients until the update; else they are merged at every step.
    """

    is_merged = merges_every_step = True

    def __init__(
        self, model: Any, engine: Engine, merge: StepMerge, replica: Replica, *, accumulates: bool = True
    ) -> None:
        self._model = model
        self._engine = engine
        self._merge = merge
        self._replica = replica
        optimizer = model.optimizer
        self._scale = loss_scale(optimizer)
        inner = inner_optimizer(optimizer)
        self._steps = accumulation_steps(model) if accumulates else 1
        self._iterations = getattr(inner, "_iterations", None)
        self._accumulators = list(getattr(inner, "_accumulated_gradients", ())) if self._steps > 1 else []
        self._watched = False

    def begin(self, *, watched: bool, entering: bool = False) -> None:
        """See `ReplicaStepper.begin`."""
        self._watched = watched
        self._merge.reset_counts()

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""
        if self._scale is not None and self._merge.separate:
            self._merge.unit = float(self._engine.read([self._scale])[0])
        with self._merge.in_mode(self._mode(last)):
            self._engine.train(batch.data, batch.share)

    def merge_if_due(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.merge_if_due`."""
        return ()

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.finish`. Accumulated gradients go to the optimizer, where they can be saved."""
        if not self._accumulators:
            return ()
        merged = self._merge.merge_accumulated([tuple(variable.shape) for variable in self._accumulators])
        if merged:
            sums = [a + b.astype(a.dtype) for a, b in zip(self._engine.read(self._accumulators), merged, strict=True)]
            self._engine.write(list(zip(self._accumulators, sums, strict=True)))
        return ()

    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""
        return self._engine.logs()

    def end(self, retry: RetryOnMembershipChange) -> None:
        """See `ReplicaStepper.end`."""

    def admit(self) -> None:
        """See `ReplicaStepper.admit`."""
        state_sync.synchronise(self._model, self._replica, metrics=True)
        self._merge.synchronise()

    def pooled(self) -> State:
        """See `ReplicaStepper.pooled`."""
        return self._merge.pooled()

    def load_pooled(self, state: State) -> None:
        """See `ReplicaStepper.load_pooled`."""
        self._merge.load_pooled(state)

    def _mode(self, last: bool | None) -> MergeMode:
        if self._steps == 1:
            return MergeMode.UPDATE
        made = int(self._engine.read([self._iterations])[0])
        if (made + 1) % self._steps == 0:
            return MergeMode.UPDATE
        return MergeMode.ACCUMULATE if last is False and not self._watched else MergeMode.ACCUMULATE_GRADIENTS


def accumulation_steps(model: Any) -> int:
    """Over how many steps the replicas may accumulate gradients of this model apart; 1: merge every step."""
    optimizer = getattr(model, "optimizer", None)  # none before `compile`
    # Two optimizers may accumulate over different steps, and a custom `train_step` may apply more than once. A dynamic
    # loss scale skips the very step that overflows, so it must see merged gradients at every step.
    simple = (
        optimizer is not None
        and len(model_state.optimizers(model)) == 1
        and takes_keras_steps(model)
        and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    )
    return (getattr(optimizer, "gradient_accumulation_steps", None) or 1) if simple else 1


def unit_of_gradients(model: Any) -> float:
    """The constant factor of the loss; see `loss_scale` for one that changes."""
    optimizer = inner_optimizer(getattr(model, "optimizer", None))
    return float(getattr(optimizer, "loss_scale_factor", None) or 1.0)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside those that scale the loss."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def count_steps(optimizer: Any, steps: int) -> None:
    """Set the optimizer's count of steps: of batches, also where gradients are accumulated (Keras's `iterations` counts
    updates then, and cannot be assigned)."""
    inner_optimizer(optimizer)._iterations.assign(steps)


def loss_scale(optimizer: Any) -> Any:
    """The variable by which the loss is multiplied; None if it is not scaled, or by a constant."""
    return optimizer.dynamic_scale if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None


def takes_keras_steps(model: Any) -> bool:
    """Whether the model's `train_step` is Keras's."""
    trainer = next(base for base in keras.Model.__mro__ if "train_step" in vars(base) and base is not keras.Model)
    return bool(type(model).train_step is trainer.train_step)
