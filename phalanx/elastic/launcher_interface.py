"""The two directions between the elastic coordinator and the launcher that runs it, one small protocol each."""

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


class MembershipControl(Protocol):
    """The launcher's requests to the coordinator. May be called from any thread."""

    def lose(self, task: str) -> None:
        """The process of this task has ended, and not successfully."""
        ...

    def has_left_early(self, task: str) -> bool:
        """Whether the process of this task, which has exited with code 0, left in the middle of an entry of the others.
        May wait a moment for what it sent last."""
        ...

    def withdraw(self, task: str) -> None:
        """This task is to leave before a next training step, because its host is withdrawn."""
        ...

    def readmit(self, task: str) -> None:
        """The next process of this task may take part again."""
        ...

    def limit_processes(self, workers: int) -> None:
        """There will never be more worker processes than this: the job need not wait for others."""
        ...

    def scale(self, workers: int) -> None:
        """A user has requested this number of workers.

        Raises: ConfigurationError if it is out of the job's bounds.
        """
        ...
