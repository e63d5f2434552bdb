"""Coordination of a `fit` between the processes of a job: the interface between the loop and the kind of job.

`ReplicaCoordination` agrees through collectives between replicas; `ParameterServerCoordination` follows the schedule of
the parameter servers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar


class TrainingBatch(Protocol):
    """This process's part of a global batch."""

    @property
    def data(self) -> tuple[Any, Any, Any]:
        """`(x, y, sample_weight)`; a placeholder of one sample if `size` is 0."""

    @property
    def step(self) -> int:
        """Index of the global batch in its epoch."""

    @property
    def size(self) -> int:
        """Number of samples in this part."""

    @property
    def global_size(self) -> int:
        """Number of samples in the whole batch."""

    @property
    def share(self) -> float:
        """`size / global_size`."""


BatchT = TypeVar("BatchT", bound=TrainingBatch)


class Coordination(Protocol[BatchT]):
    """Interface that `FitLoop` needs from the kind of job. The loop calls the methods in the order of their definition.

    Attributes:
        steps_per_group: Number of steps of which callbacks see the first and the last (`steps_per_execution`).
    """

    steps_per_group: int

    def begin(self) -> None:
        """Run `on_train_begin`, then set every process to the same initial state, or to that of a checkpoint."""

    def is_over(self) -> bool:
        """Return whether no epoch is left to train. Sets `FitState.epoch` if the chief has gone back."""

    def begin_epoch(self) -> bool:
        """Fetch what an epoch starts from; False if this process resumes in the middle of it."""

    def epoch_batches(self) -> AbstractContextManager[None]:
        """Context of an epoch's steps: opens the input after `on_epoch_begin`; afterwards all processes are equal."""

    def next_batch(self) -> BatchT | None:
        """Return the next batch of the epoch; None at its end."""

    def begin_group(self) -> None:
        """After `on_train_batch_begin`, agree on what callbacks may have changed."""

    def train_step(self, batch: BatchT) -> BatchT:
        """Take one training step; return the batch on which it was finally taken."""

    def end_group(self, step: int) -> bool:
        """After `on_train_batch_end`, return whether the epoch stops here. Saves, and admits new members, when due."""

    def epoch_logs(self) -> dict[str, Any] | None:
        """Return the logs of the epoch's training steps; None if it was abandoned because the chief went back."""

    def evaluate(self) -> dict[str, Any] | None:
        """Return the validation logs, without the prefix `val_`; None if the epoch was abandoned in the meantime."""

    def merge_logs(self, logs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the epoch's logs for this process's callbacks and history; None if it has taken no step in the epoch,
        so that they do not see its end."""

    def end_epoch(self) -> None:
        """After `on_epoch_end`, agree on whether to stop, count the epoch and save."""

    def end(self) -> AbstractContextManager[None]:
        """Context of `on_train_end`: before it the model has the final weights, after it they are equal everywhere."""
