"""Steppers take the training steps: what the loop needs of them, whatever computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from phalanx.compression.base_compression import State
from phalanx.engines.engine import Engine
from phalanx.training import state_sync
from phalanx.training.joint_batches import JointBatch
from phalanx.training.replica import Replica
from phalanx.training.steps.gradient_merge import StepMerge

T = TypeVar("T")


class RetryOnMembershipChange(Protocol):
    """See `Replica.retry`."""

    def __call__(self, action: Callable[[], T], /) -> T: ...


class Stepper(Protocol):
    """Takes the training steps of one model: the seam between the loop and what computes.

    It does not say what a step consists of: engine and merge, or a single program for many devices
    (`SynchronousStepper`), or parameter servers (`ParameterServerStepper`).
    """

    def train(self, batch: Any, *, last: bool | None = None) -> None:
        """One step on a `TrainingBatch`.

        Args:
            last: whether it is the epoch's last; None where that is not known.
        """

    def logs(self) -> Mapping[str, Any]:
        """The logs of the epoch until now."""


class ReplicaStepper(ABC):
    """Takes the steps of a model that several ranks train, epoch after epoch; see `Stepper`.

    Args:
        model: compiled.
        engine: computes its steps.
        merge: merges what they contribute.
        replica: this process.

    Attributes:
        merges_every_step: whether each step is one of all replicas, which happens on all or on none.
    """

    merges_every_step = True

    def __init__(self, model: Any, engine: Engine, merge: StepMerge, replica: Replica) -> None:
        self._model = model
        self._engine = engine
        self._merge = merge
        self._replica = replica

    @property
    def is_merged(self) -> bool:
        """Whether the replicas met at the last step, so that decisions may be taken together now."""
        return True

    def begin(self, *, watched: bool, entering: bool = False) -> None:  # noqa: B027 (it may have nothing to do)
        """An epoch begins; the engine has begun.

        Args:
            watched: whether callbacks of any rank see the logs of single batches.
            entering: whether this process joins or resumes in the middle of the epoch.
        """

    @abstractmethod
    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""

    def merge_if_due(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """A step is over: merge if it is time to. Returns the tasks whose unmerged steps have been merged."""
        return ()

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """The epoch's steps are done, and the engine has not ended yet: afterwards all replicas are alike. Returns what
        `merge_if_due` does."""
        return ()

    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""
        return self._engine.logs()

    def end(self, retry: RetryOnMembershipChange) -> None:  # noqa: B027 (likewise)
        """`fit` has taken its last step, and the engine has ended."""

    def admit(self) -> None:
        """In elastic jobs, while the replicas are merged and the engine has ended: give those who join what the others
        have. All ranks must call."""
        state_sync.synchronise(self._model, self._replica, metrics=True)
        self._merge.synchronise()

    def pooled(self) -> State:
        """While they are merged: what the replicas keep besides the model, pooled. All ranks must call."""
        return self._merge.pooled()

    def load_pooled(self, state: State) -> None:
        """Continue from what `pooled` returned; the model has the values of then already."""
        self._merge.load_pooled(state)
