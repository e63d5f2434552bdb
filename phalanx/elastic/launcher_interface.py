"""What the elastic coordinator requests of the launcher that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ElasticJob(Protocol):
    """What the coordinator requests of the launcher. Called in a thread of the coordinator, while it holds its lock: no
    method may wait for anything."""

    def evict(self, task: str) -> None:
        """Kill the process of this task: it is stuck, silent or cut off."""
        ...

    def release(self, task: str) -> None:
        """The process of this task is about to exit because fewer workers are requested or its host was withdrawn."""
        ...

    def finish(self, tasks: Sequence[str]) -> None:
        """All members, which ran these tasks, have finished, and with them the job. May be called again."""
        ...

    def fail(self, reason: str, code: int) -> None:
        """The job cannot continue, for this reason, which has this exit code."""
        ...

    def resize(self, workers: int) -> None:
        """A user has requested this number of workers (`phalanx scale`)."""
        ...

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None:
        """These tasks, in rank order, are the members from now on."""
        ...

    def training_changed(self, *, is_training: bool) -> None:
        """Whether members are inside an entry (such as `fit`) from now on."""
        ...

    def log(self, text: str) -> None:
        """Show one line to the user."""
        ...
