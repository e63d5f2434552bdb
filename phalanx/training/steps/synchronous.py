"""Synchronous steps: all replicas take each step together, and merge its gradients before the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.engines.engine import Engine
from phalanx.keras_compat.model_state import inner_optimizer
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.steps.gradient_merge import MergeMode, StepMerge
from phalanx.training.steps.optimizer_properties import accumulation_steps, accumulators, loss_scale
from phalanx.training.steps.stepper import ReplicaStepper, RetryOnMembershipChange


class SynchronousStepper(ReplicaStepper):
    """Stepper of replicas that take each step together. Gradients that the optimizer accumulates are merged on update.

    Args:
        accumulates: Whether a replica may keep its gradients until the update; if not, they are merged at every step.
    """

    def __init__(
        self, model: Any, engine: Engine, merge: StepMerge, replica: Replica, *, accumulates: bool = True
    ) -> None:
        super().__init__(model, engine, merge, replica)
        optimizer = model.optimizer
        self._scale = loss_scale(optimizer)
        if merge.overflow is not None:
            merge.overflow.watch_weights(model)
        inner = inner_optimizer(optimizer)
        self._steps = accumulation_steps(model) if accumulates else 1
        self._iterations = getattr(inner, "_iterations", None)
        self._accumulators = accumulators(inner) if self._steps > 1 else []
        self._has_batch_listeners = False

    def begin(self, *, has_batch_listeners: bool, entering: bool = False) -> None:
        """See `ReplicaStepper.begin`."""
        self._has_batch_listeners = has_batch_listeners
        self._merge.reset_counts()

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""
        if self._scale is not None and self._merge.compresses:
            # The scale of this step: residuals of earlier gradients can be added to these only in the same unit.
            self._merge.loss_scale = float(self._engine.read([self._scale])[0])
        self._merge.set_batch_size(batch.global_size, batch.fixed_size)
        with self._merge.in_mode(self._mode(last)):
            self._engine.train(batch.data, batch.share)
        if not self._engine.merges and self._replica.notice is not None:  # one program, in a `fit` that saves itself
            self._merge.merge_notice()

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.finish`. Moves accumulated gradients to the optimizer, where they can be saved."""
        if not self._accumulators:
            return ()
        # None on all ranks or on none: all have accumulated gradients of the same weights in the same steps.
        merged = self._merge.merge_accumulated([weight for weight, _ in self._accumulators])
        pairs = zip(self._accumulators, merged, strict=True)
        found = [(accumulator, total) for (_, accumulator), total in pairs if total is not None]
        if found:
            held = self._engine.read([accumulator for accumulator, _ in found])
            self._engine.write([(each, a + b.astype(a.dtype)) for (each, b), a in zip(found, held, strict=True)])
        return ()

    def _mode(self, last: bool | None) -> MergeMode:
        if self._steps == 1:
            return MergeMode.UPDATE
        # Keras counts batches here, even between updates.
        steps = int(self._engine.read([self._iterations])[0])
        if (steps + 1) % self._steps == 0:
            return MergeMode.UPDATE
        # Counters may wait, too, unless a callback sees them, or the epoch ends and must report them.
        waits = last is False and not self._has_batch_listeners and self._engine.metric_rules.only_count
        return MergeMode.ACCUMULATE if waits else MergeMode.ACCUMULATE_GRADIENTS
