"""Figures that a worker reports to its launcher, and that the launcher passes to all who watch the job."""

from __future__ import annotations

import msgspec


class FinishedEpoch(msgspec.Struct, frozen=True):
    """Logs of a complete epoch, including those of its validation.

    Attributes:
        epoch: Index of the epoch, starting at 0.
        logs: Numbers by name.
    """

    epoch: int
    logs: dict[str, float | None]


class SavedCheckpoint(msgspec.Struct, frozen=True):
    """Last checkpoint that this process has written.

    Attributes:
        step: Number of training steps that it contains.
        path: Path of the checkpoint.
    """

    step: int
    path: str


class ServerFigures(msgspec.Struct, frozen=True):
    """Figures of a parameter server.

    Attributes:
        version: Version of the values; it increases with every update.
        workers: Number of connected workers.
    """

    version: int
    workers: int


class GpuFigures(msgspec.Struct, frozen=True):
    """Current load of a GPU.

    Attributes:
        index: Index of the GPU on its host.
        name: Model name of the GPU.
        utilization: Fraction of the time that the GPU computes.
        memory, memory_total: Bytes in use and in total.
    """

    index: int
    name: str
    utilization: float
    memory: int
    memory_total: int


class WorkerFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process's figures since it started, unless noted otherwise.

    Attributes:
        computed_s, waited_s: Seconds outside and inside collectives since the process joined its job.
        steps: Training steps taken.
        samples: Samples that this process has trained on in these steps.
        bytes_sent: Bytes sent in collectives, through shared memory or links.
        bytes_on_links: The part of `bytes_sent` that was sent over links.
        memory: Main memory in use now, in bytes; 0 if unknown.
        gpu: Load of the GPU that it computes on; None if unknown.
        total_epochs: Number of epochs of the current `fit`; None before the first.
        logs: Current loss and metrics; None for values that are not finite.
        finished_epoch: Last finished epoch, if any.
        checkpoint: Last saved checkpoint, if any.
        server: Figures of a parameter server; None for other tasks.
    """

    computed_s: float = 0.0
    waited_s: float = 0.0
    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    bytes_on_links: int = 0
    memory: int = 0
    gpu: GpuFigures | None = None
    total_epochs: int | None = None
    logs: dict[str, float | None] = {}
    finished_epoch: FinishedEpoch | None = None
    checkpoint: SavedCheckpoint | None = None
    server: ServerFigures | None = None

    def since(self, former: WorkerFigures) -> WorkerFigures:
        """Return the increase since earlier figures. Momentary values are left out."""
        return WorkerFigures(
            computed_s=self.computed_s - former.computed_s,
            waited_s=self.waited_s - former.waited_s,
            steps=self.steps - former.steps,
            samples=self.samples - former.samples,
            bytes_sent=self.bytes_sent - former.bytes_sent,
            bytes_on_links=self.bytes_on_links - former.bytes_on_links,
        )


class TaskReport(msgspec.Struct, frozen=True):
    """A task's current activity, reported about twice a second while it changes.

    Attributes:
        phase, epoch, step: Current activity, as in `runtime.progress`.
        age_s: Seconds since this activity began.
        saves_checkpoint: Whether it can save a checkpoint on request.
        figures: Current figures; None if they have not changed since the last report.
    """

    phase: str
    epoch: int | None
    step: int | None
    age_s: float
    saves_checkpoint: bool = False
    figures: WorkerFigures | None = None
