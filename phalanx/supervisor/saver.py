"""`Saver`: TensorFlow 1's `tf.train.Saver`, for the model of a managed session."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.errors import ConfigurationError

if TYPE_CHECKING:
    from phalanx.supervisor.managed_session import ManagedSession

DEFAULT_MAX_TO_KEEP = 5
"""The default of TensorFlow 1."""


class Saver:
    """Saves and restores the model of a managed session.

    Args:
        max_to_keep: Number of newest checkpoints to keep; None or 0 keeps all.
    """

    def __init__(self, max_to_keep: int | None = DEFAULT_MAX_TO_KEEP):
        if max_to_keep is not None and max_to_keep < 0:
            raise ConfigurationError(f"max_to_keep is {max_to_keep}; write a number of checkpoints, or None for all.")
        self.max_to_keep = max_to_keep or None

    def save(
        self,
        session: ManagedSession,
        save_path: str | os.PathLike[str] | None = None,
        global_step: int | None = None,
    ) -> str | None:
        """Save weights and optimizer state, all from the same step.

        If called in another thread than the session's (see `Supervisor.loop`), this waits for the next step boundary.

        Args:
            save_path: Directory and name prefix; None: `Supervisor.save_path`.
            global_step: The step in the file name; None: the session's step.

        Returns: the file that was written; None on all workers but the chief, which write nothing.

        Raises: OSError if it cannot be written.
        """
        path = session.save(save_path, global_step)
        return None if path is None else str(path)

    def restore(self, session: ManagedSession, save_path: str | os.PathLike[str]) -> None:
        """Restore the session's model from a checkpoint that `save` returned. Must not be called during `fit`.

        Raises: ConfigurationError if it is damaged or of another model.
        """
        session.restore(save_path)
