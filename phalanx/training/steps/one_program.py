"""Steps of a model that one compiled program trains on many devices: it merges, accumulates and updates by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.engines.engine import Engine
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.steps.gradient_merge import StepMerge
from phalanx.training.steps.stepper import ReplicaStepper, RetryOnMembershipChange


class OneProgramStepper(ReplicaStepper):
    """Every step is a call of the program, which all processes make together."""

    merges_every_step = True

    def __init__(self, engine: Engine, merge: StepMerge, replica: Replica) -> None:
        self._engine = engine
        self._merge = merge
        self._replica = replica

    def begin(self, *, watched: bool, entering: bool = False) -> None:
        """See `ReplicaStepper.begin`."""

    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""
        self._engine.train(batch.data, batch.share)
        if self._replica.notice is not None:  # a `fit` that saves itself
            self._merge.merge_notice()

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """See `ReplicaStepper.finish`."""
        return ()

    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""
        return self._engine.logs()
