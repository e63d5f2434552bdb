"""The protocol of hosts, on which workers run.

A host starts worker processes, reports what happens to them as events (`host_messages`), and delivers signals. It makes
no decisions about the job. To launch on another platform, implement `WorkerHost` in a new file next to this one and
create it in `worker_placement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.launcher.host_messages import Event, WorkerSpec


class WorkerHost(Protocol):
    """A place that runs workers. All calls come from one thread at a time.

    Attributes:
        name: Name of the host in messages.
        lost: Whether the connection to it has ended. If so, nothing can be started there anymore.
    """

    name: str
    lost: bool

    @property
    def needs_polling(self) -> bool:
        """Whether exits do not wake the selector, so that `events` must be called every few milliseconds."""
        ...

    def start(self, specs: Sequence[WorkerSpec]) -> list[Event]:
        """Start workers. An empty list only registers the host's descriptors with the selector."""
        ...

    def restart(self, rank: int) -> Event | None:
        """Restart a worker that has exited. Its `Started` is returned now or later by `events`."""
        ...

    def events(self) -> list[Event]:
        """Return the events since the last call, without blocking."""
        ...

    def dump_stacks(self, rank: int) -> None:
        """Request the stacks of a worker's threads, which arrive with its `Exited`."""
        ...

    def request_checkpoint(self, rank: int) -> None:
        """Ask a worker for a checkpoint, which it writes after the next step if its program has a `Checkpoint`."""
        ...

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker. Does nothing if it has exited."""
        ...

    def close(self) -> None:
        """Kill the workers that still run and release everything. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """A task of the job, and the host that runs it.

    Attributes:
        task: Name of the task, such as `worker/0`.
    """

    spec: WorkerSpec
    task: str
    host: WorkerHost

    def signal(self, number: int) -> None:
        """Send a signal to the task, if it runs."""
        self.host.signal(self.spec.rank, number)
