"""State of a running `fit`, shared by the loop, the coordination, recovery and checkpointing."""

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
    """State of one call of `fit`.

    Attributes:
        arguments: The arguments of `fit`.
        stepper: Takes the training steps; see `steps/stepper.py`.
        callbacks: The `CallbackList` that this process runs; a new one once it becomes chief.
        has_batch_hooks: Whether any of the callbacks sees single training batches.
        progress_bar: The progress bar among the callbacks, if this process shows one.
        epoch: Index of the running epoch; between two epochs, of the next one.
        logs: Logs of the last epoch, including validation.
        exit_stack: Restores the callbacks' methods, and releases their claims, when the `fit` is over.
    """

    arguments: FitArguments
    stepper: Stepper = field(init=False)
    callbacks: Any = None
    has_batch_hooks: bool = False
    progress_bar: progress_bar.ReplicaProgbar | None = None
    epoch: int = 0
    logs: dict[str, Any] = field(default_factory=dict)
    exit_stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def use_callbacks(self, callbacks: Any) -> None:
        """Run this `CallbackList` from here on."""
        self.callbacks = callbacks
        self.has_batch_hooks = callback_hooks.runs_batch_hooks(callbacks, "train")
        self.progress_bar = progress_bar.progress_bar(callbacks)


@dataclass(kw_only=True)
class ReplicaFitState(FitState):
    """State of a `fit` on one of several replicas.

    Attributes:
        source: This rank's part of the training data.
        validation: This rank's part of the validation data; None without any.
        batches: Batches of the running epoch; None between two epochs.
        has_batch_listeners: Whether callbacks of any rank see single training batches.
        has_validation_batch_listeners: Whether callbacks of any rank see single validation batches.
        stop_requested: Whether callbacks stopped the training at the start of the running epoch, before its first step.
        chief_adds_logs: Whether callbacks that only the chief runs may add to the logs of an epoch.
    """

    stepper: ReplicaStepper = field(init=False)
    source: ShardedInput
    validation: ShardedInput | None = None
    batches: JointBatches | None = None
    has_batch_listeners: bool = False
    has_validation_batch_listeners: bool = False
    stop_requested: bool = False
    chief_adds_logs: bool = False

    def is_last(self, step: int) -> bool | None:
        """Return whether a step is its epoch's last; None if unknown."""
        position, source = self.source.position, self.source.source
        batches = position.batches_from(position.running_epoch)
        if batches is None or source.num_batches is None or source.traits.may_end_early:
            return None
        return step + 1 >= batches
