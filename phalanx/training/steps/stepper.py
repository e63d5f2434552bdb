"""Steppers take the training steps: what the loop needs of them, whatever computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from phalanx.compression.base_compression import State
from phalanx.training.joint_batches import JointBatch

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


class ReplicaStepper(ABC):
    """Takes the steps of a model that several ranks train, epoch after epoch; see `Stepper`.

    Attributes:
        merges_every_step: whether each step is one of all replicas, which happens on all or on none.
    """

    merges_every_step: bool

    @property
    def is_merged(self) -> bool:
        """Whether the replicas met at the last step, so that decisions may be taken together now."""
        return True

    @abstractmethod
    def begin(self, *, watched: bool, entering: bool = False) -> None:
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

    @abstractmethod
    def finish(self, retry: RetryOnMembershipChange) -> Sequence[str]:
        """The epoch's steps are done, and the engine has not ended yet: afterwards all replicas are alike. Returns what
        `merge_if_due` does."""

    @abstractmethod
    def logs(self) -> Mapping[str, Any]:
        """See `Stepper.logs`."""

    def end(self, retry: RetryOnMembershipChange) -> None:  # noqa: B027 (a stepper may have nothing to do)
        """`fit` has taken its last step, and the engine has ended."""

    def admit(self) -> None:
        """In elastic jobs, while the replicas are merged and the engine has ended: give those who join what the others
        have. All ranks must call."""
        raise NotImplementedError

    def pooled(self) -> State:
        """While they are merged: what the replicas keep besides the model, pooled. All ranks must call."""
        return {}

    def load_pooled(self, state: State) -> None:  # noqa: B027
        """Continue from what `pooled` returned; the model has the values of then already."""
