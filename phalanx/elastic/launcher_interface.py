"""The interface through which the elastic coordinator sends requests to its launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class LauncherActions(Protocol):
    """Requests of the coordinator to the launcher. Called in a thread of the coordinator that holds its lock, so no
    method may block."""

    def evict(self, task: str) -> None:
        """Kill the process of this task, which is stuck, silent or cut off."""
        ...

    def release(self, task: str) -> None:
        """Expect the exit of this task's process: fewer workers are requested or its host was withdrawn."""
        ...

    def finish(self, tasks: Sequence[str]) -> None:
        """Finish the job: all members, which ran these tasks, have finished. May be called again."""
        ...

    def fail(self, reason: str, code: int) -> None:
        """End the job, which cannot continue for this reason, with this exit code."""
        ...

    def resize(self, workers: int) -> None:
        """Set the number of workers that a user has requested (`phalanx scale`)."""
        ...

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None:
        """Record that these tasks, in rank order, are the members of a new generation."""
        ...

    def training_changed(self, *, is_training: bool) -> None:
        """Record whether members are inside an entry such as `fit`."""
        ...

    def log(self, text: str) -> None:
        """Show one line to the user."""
        ...
