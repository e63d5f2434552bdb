"""Where workers run: the protocol that every kind of host satisfies.

A host starts worker processes, reports what happens to them as events (`host_messages`), and delivers signals. It never
decides anything about the job. To launch on another platform, implement `WorkerHost` in a new file next to this one and
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
        name: of the host, for messages.
        lost: whether the connection to it has ended; then nothing can be started there any more.
    """

    name: str
    lost: bool

    @property
    def needs_polling(self) -> bool:
        """Whether exits wake no selector, so that `events` must be called every few milliseconds."""
        ...

    def start(self, specs: Sequence[WorkerSpec]) -> list[Event]:
        """Start workers; none only connects the host's descriptors with the selector."""
        ...

    def restart(self, rank: int) -> Event | None:
        """Start a worker again that has exited; its `Started` comes now or with `events`."""
        ...

    def events(self) -> list[Event]:
        """What happened since the last call; never blocks."""
        ...

    def dump_stacks(self, rank: int) -> None:
        """Have a worker write the stacks of its threads, which come with its `Exited`."""
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
    """A task of the job and the host that runs it.

    Attributes:
        task: its name, such as `worker/0`.
    """

    spec: WorkerSpec
    task: str
    host: WorkerHost

    def signal(self, number: int) -> None:
        """Send a signal to the task, if it runs."""
        self.host.signal(self.spec.rank, number)
