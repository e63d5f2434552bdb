"""Writes the checkpoints of a `fit`, in either format."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from phalanx.checkpoint.background_save import State
from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from phalanx.checkpoint.sharded_checkpoint import ShardedCheckpoint
from phalanx.storage.paths import StoragePath

logger = logging.getLogger(__name__)


class FitWriter:
    """Writes the checkpoints of a `fit` one after the other, in parallel with the training thread.

    Args:
        checkpoints: Directory of the checkpoints.

    Attributes:
        is_collective: Whether all processes call its methods, each for its part; else only the chief does.
    """

    def __init__(self, checkpoints: CheckpointDirectory | ShardedCheckpoint) -> None:
        self.is_collective = isinstance(checkpoints, ShardedCheckpoint)
        self._begin = checkpoints.save if isinstance(checkpoints, ShardedCheckpoint) else checkpoints.begin
        self._background = checkpoints.background
        self._path_of: Callable[[int], StoragePath] = checkpoints.path_of

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._background.busy

    def begin(self, model: Any, step: int, state: State) -> bool:
        """Copy the model and write a checkpoint in the background, after any that is being written.

        Args:
            step: Global step of the model.
            state: Returns the additional state; see `State`.

        Returns: False, after a warning, if it cannot be written.
        """
        self.wait()
        return self._run_or_warn(lambda: self._begin(model, step, state))

    def write(self, model: Any, step: int, state: State) -> StoragePath | None:
        """Write a checkpoint now, after any that is being written. Returns None, after a warning, if that fails."""
        return self._path_of(step) if self.begin(model, step, state) and self.wait() else None

    def check(self) -> None:
        """Raise the error of the last checkpoint in the background: SupersededError if this process may no longer
        write, ConfigurationError if another job has the directory, or the error of a state that cannot be written."""
        if not self.busy:
            self.wait()

    def wait(self) -> bool:
        """Wait until the checkpoint that is being written is finished. Returns whether this process has written its
        part. Raises: see `check`."""
        return self._run_or_warn(self._background.wait)

    def _run_or_warn(self, action: Callable[[], None]) -> bool:
        """Run an action. Returns whether the file system permitted it."""
        try:
            action()
        except OSError as error:
            # A full disk may recover. Everything else ends the `fit`: SupersededError must, because the directory
            # belongs to another process.
            text = "%s. Training continues; the next checkpoint is tried as usual."
            logger.warning(text, error.strerror or error)
            return False
        return True
