"""Where the workers of an elastic job run: what a job asks of its pool of hosts."""

from __future__ import annotations

from typing import Protocol


class SlotProvider(Protocol):
    """Decides where the workers of an elastic job run (`HostPool`). Called from the thread that runs the job."""

    def task_failed(self, task: str) -> None:
        """The process of a task has failed. Called before it is decided whether it restarts."""
        ...

    def has_left_early(self, task: str) -> bool:
        """Whether the process of a task, which has exited with code 0, left in the middle of the training."""
        ...

    def worker_exited(self, rank: int, *, failed: bool) -> bool:
        """A worker has exited but may run again. Returns whether it can be restarted in its slot; otherwise the slot is
        free and the worker waits for another one."""
        ...

    def retire(self, rank: int) -> None:
        """A worker has exited for good."""
        ...

    def set_target(self, workers: int) -> None:
        """This number of workers is wanted from now on."""
        ...

    def update(self) -> float | None:
        """React to what has changed, and start workers where there is room. Called after every event. Returns the
        seconds until the next call at the latest; None if that does not matter."""
        ...
