"""`Saver`: TensorFlow 1's `tf.train.Saver`, for the model of a managed session."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.errors import ConfigurationError

if TYPE_CHECKING:
    from phalanx.supervisor.managed_session import ManagedSession

DEFAULT_MAX_TO_KEEP = 5
"""As in TensorFlow 1."""


class Saver:
    """Saves and restores the model of a managed session.

    Args:
        max_to_keep: how many of the newest checkpoints are kept; None or 0: all.
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
        """Save weights and optimizer state, all of one step.

        From another thread than the session's (`Supervisor.loop`), this waits for the next step boundary.

        Args:
            save_path: the directory and the beginning of the name; None: `Supervisor.save_path`.
            global_step: for the name; None: the session's.

        Returns: the file that was written; None on other workers than the chief, which write nothing.

        Raises: OSError if it cannot be written.
        """
        path = session.save(save_path, global_step)
        return None if path is None else str(path)

    def restore(self, session: ManagedSession, save_path: str | os.PathLike[str]) -> None:
        """Put a checkpoint that `save` returned into the session's model. Call it between two calls of `fit`.

        Raises: ConfigurationError if it is damaged or of another model.
        """
        session.restore(save_path)
