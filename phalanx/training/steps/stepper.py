"""Interface between the loop of `fit` and the steppers, which take the training steps."""

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
    """Interface between the loop and the computation of one model's training steps.

    It does not specify what a step consists of: engine and merge, or a single program for many devices
    (`SynchronousStepper`), or parameter servers (`ParameterServerStepper`).
    """

    def train(self, batch: Any, *, last: bool | None = None) -> None:
        """Take one step on a `TrainingBatch`.

        Args:
            last: Whether it is the epoch's last; None if unknown.
        """

    def logs(self) -> Mapping[str, Any]:
        """Return the logs of the epoch so far."""


class ReplicaStepper(ABC):
    """Stepper of a model that several ranks train, epoch after epoch; see `Stepper`.

    Args:
        model: The compiled model.
        engine: Computes the steps.
        merge: Merges the contributions of the replicas.
        replica: This process as a replica.

    Attributes:
        merges_every_step: Whether each step is taken by all replicas, and succeeds on all or on none.
    """

    merges_every_step = True

    def __init__(self, model: Any, engine: Engine, merge: StepMerge, replica: Replica) -> None:
        self._model = model
        self._engine = engine
        self._merge = merge
        self._replica = replica

    @property
    def is_merged(self) -> bool:
        """Whether the replicas merged in the last step, so that collective decisions are possible now."""
        return True

    def begin(self, *, has_batch_listeners: bool, entering: bool = False) -> None:  # noqa: B027 (it may have nothing to do)
        """Begin an epoch, after the engine has begun.

        Args:
            has_batch_listeners: Whether callbacks of any rank see the logs of single batches.
            entering: Whether this process joins or resumes in the middle of the epoch.
        """

    @abstractmethod
    def train(self, batch: JointBatch, *, last: bool | None = None) -> None:
        """See `Stepper.train`."""

    def merge_if_due(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """Merge after a step, if it is time to. Return the tasks whose unmerged steps have been merged."""
        return ()

    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """Merge at the end of an epoch, before the engine ends, so that all replicas are equal; as `merge_if_due`."""
        return ()

    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""
        return self._engine.logs()

    def end(self, retry: RetryOnMembershipChange) -> None:  # noqa: B027 (likewise)
        """Finish after the last step of `fit`, when the engine has ended."""

    def admit(self) -> None:
        """In elastic jobs, while the replicas are merged and the engine has ended, send the common state to processes
        that join. All ranks must call."""
        state_sync.synchronize(self._model, self._replica, metrics=True)
        self._merge.synchronize()

    def combined_state(self) -> State:
        """While merged, return the replicas' state in addition to the model, combined. All ranks must call."""
        return self._merge.combined_state()

    def load_combined(self, state: State) -> None:
        """Continue from what `combined_state` returned; the model already has the values of that time."""
        self._merge.load_combined(state)
