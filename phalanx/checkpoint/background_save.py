"""Checkpoints written by a thread in parallel with the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.monitoring import timeline
from phalanx.monitoring.worker_figures import SavedCheckpoint
from phalanx.runtime import telemetry
from phalanx.runtime.exit_codes import sendable
from phalanx.storage.paths import StoragePath

State = Callable[[], Mapping[str, Any]]
"""Returns what is saved in addition to the model; called in the background."""


class BackgroundSave:
    """Writes one checkpoint after the other in the background.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # the thread's error; valid only after it was joined

    @property
    def busy(self) -> bool:
        """Whether this process is writing a checkpoint."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, step: int, write: Callable[[], StoragePath | None]) -> None:
        """Write the checkpoint of a step; call only after `wait_for_error`.

        Args:
            write: Writes the checkpoint and returns its path; None if another process completes it.
        """
        # Not a daemon: a program that ends right after `fit` waits for its last checkpoint.
        self._thread = threading.Thread(target=self._run, args=(step, write), name=self._name, daemon=False)
        self._thread.start()

    def wait_for_error(self) -> Exception | None:
        """Wait until the checkpoint is written. Returns its error, once: the next checkpoint is tried regardless."""
        if self._thread is not None:
            self._thread.join()  # as long as the disk or the store takes
            self._thread = None
        error, self._error = self._error, None
        return error

    def wait(self) -> None:
        """Wait like `wait_for_error`. Raises: the error."""
        if (error := self.wait_for_error()) is not None:
            raise error

    def _run(self, step: int, write: Callable[[], StoragePath | None]) -> None:
        try:
            with timeline.current.span(timeline.CHECKPOINTS, "checkpoint", {"step": step}):
                if (path := write()) is not None:
                    telemetry.current.checkpoint = SavedCheckpoint(step, sendable(str(path)))
        except Exception as error:  # the training thread raises it
            self._error = error
