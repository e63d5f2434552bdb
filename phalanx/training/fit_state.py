"""Where a running `fit` stands: shared by the loop, the coordination and what recovers or saves it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from phalanx.data import ShardedInput
from phalanx.training import callback_hooks, progress_bar
from phalanx.training.fit_arguments import FitArguments
from phalanx.training.joint_batches import JointBatches
from phalanx.training.steps.stepper import ReplicaStepper, Stepper


@dataclass(kw_only=True)
class FitState:
    """The state of one call of `fit`.

    Attributes:
        arguments: the arguments of `fit`.
        stepper: takes the training steps; see `steps/stepper.py`.
        callbacks: the `CallbackList` that this process runs; another one once it becomes chief.
        has_batch_hooks: whether any of these sees single training batches.
        progress_bar: among the callbacks, if this process shows one.
        epoch: index of the running epoch; between two epochs, of the next one.
        logs: the logs of the last epoch, with those of its validation.
        undo: gives the callbacks their own methods back, and what they claim to others, when the `fit` is over.
    """

    arguments: FitArguments
    stepper: Stepper = field(init=False)
    callbacks: Any = None
    has_batch_hooks: bool = False
    progress_bar: progress_bar.ReplicaProgbar | None = None
    epoch: int = 0
    logs: dict[str, Any] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack, repr=False)

    def use_callbacks(self, callbacks: Any) -> None:
        """Run this `CallbackList` from here on."""
        self.callbacks = callbacks
        self.has_batch_hooks = callback_hooks.runs_batch_hooks(callbacks, "train")
        self.progress_bar = progress_bar.progress_bar(callbacks)


@dataclass(kw_only=True)
class ReplicaFitState(FitState):
    """The state of a `fit` on one of several replicas.

    Attributes:
        source: this rank's part of the training data.
        validation: this rank's part of the validation data; None without any.
        batches: the walk over the running epoch; None between two epochs.
        watched: whether callbacks of any rank see single batches of the training.
        watched_validation: whether callbacks of any rank see single batches of the validation.
        stop_requested: whether callbacks ended the training when the running epoch began, before its first step.
        chief_adds_logs: whether callbacks that only the chief runs may add to the logs of an epoch.
    """

    stepper: ReplicaStepper = field(init=False)
    source: ShardedInput
    validation: ShardedInput | None = None
    batches: JointBatches | None = None
    watched: bool = False
    watched_validation: bool = False
    stop_requested: bool = False
    chief_adds_logs: bool = False

    def is_last(self, step: int) -> bool | None:
        """Whether a step is its epoch's last; None where that is not known."""
        position, source = self.source.position, self.source.source
        batches = position.batches_from(position.running)
        if batches is None or source.num_batches is None or source.traits.may_end_early:
            return None
        return step + 1 >= batches
