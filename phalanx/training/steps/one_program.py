"""Steps of a model that one compiled program trains on many devices: it merges, accumulates and updates by itself."""

from __future__ import annotations

from phalanx.training.joint_batches import JointBatch
from phalanx.training.steps.stepper import ReplicaStepper


class OneProgramStepper(ReplicaStepper):
    """Every step is a call of the program, which all processes make together."""

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""
        self._engine.train(batch.data, batch.share)
        if self._replica.notice is not None:  # a `fit` that saves itself
            self._merge.merge_notice()
