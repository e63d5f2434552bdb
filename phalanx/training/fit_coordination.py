"""How the processes of one job coordinate a `fit`: the interface between the loop and the kind of job.

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
        """`(x, y, sample_weight)`; a placeholder of one sample where `size` is 0."""

    @property
    def step(self) -> int:
        """Index of the global batch in its epoch."""

    @property
    def size(self) -> int:
        """Samples of this part."""

    @property
    def global_size(self) -> int:
        """Samples of the whole batch."""

    @property
    def share(self) -> float:
        """`size / global_size`."""


BatchT = TypeVar("BatchT", bound=TrainingBatch)


class Coordination(Protocol[BatchT]):
    """What `FitLoop` needs from the kind of job. The loop calls the methods in the order in which they stand here.

    Attributes:
        steps_per_group: callbacks see the first and the last of this many steps (`steps_per_execution`).
    """

    steps_per_group: int

    def begin(self) -> None:
        """Run `on_train_begin`, then give every process the same initial state, or that of a checkpoint."""

    def is_over(self) -> bool:
        """Whether no further epoch is to be trained. Sets `FitState.epoch` where the chief has gone back."""

    def begin_epoch(self) -> bool:
        """Fetch what an epoch starts from; False where this process resumes in the middle of it."""

    def epoch_batches(self) -> AbstractContextManager[None]:
        """Around the steps of an epoch: open the input after `on_epoch_begin`; afterwards all processes are alike."""

    def next_batch(self) -> BatchT | None:
        """The next batch of the epoch; None at its end."""

    def begin_group(self) -> None:
        """After `on_train_batch_begin`: agree on what callbacks may have changed."""

    def train_step(self, batch: BatchT) -> BatchT:
        """Take one training step; returns the batch as it was trained on in the end."""

    def end_group(self, step: int) -> bool:
        """After `on_train_batch_end`: whether the epoch stops here. Saves, and admits new members, if it is time."""

    def epoch_logs(self) -> dict[str, Any] | None:
        """The logs of the epoch's training steps; None if the epoch was abandoned because the chief went back."""

    def evaluate(self) -> dict[str, Any] | None:
        """The logs of the validation data, without the prefix `val_`; None if the epoch was abandoned meanwhile."""

    def merge_logs(self, logs: dict[str, Any]) -> dict[str, Any] | None:
        """The epoch's logs as this process's callbacks and history see them; None if it has taken no step in it: they
        see no end of the epoch then."""

    def end_epoch(self) -> None:
        """After `on_epoch_end`: agree on whether to stop, count the epoch and save."""

    def end(self) -> AbstractContextManager[None]:
        """Around `on_train_end`: before it the final weights are in the model, after it they are alike everywhere."""
