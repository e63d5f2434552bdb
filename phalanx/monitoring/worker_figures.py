"""What a worker shows to its launcher, and through it to all who watch the job."""

from __future__ import annotations

import msgspec


class FinishedEpoch(msgspec.Struct, frozen=True):
    """The logs of a whole epoch, with those of its validation.

    Attributes:
        epoch: its index, from 0.
        logs: numbers by name.
    """

    epoch: int
    logs: dict[str, float | None]


class SavedCheckpoint(msgspec.Struct, frozen=True):
    """The last checkpoint that this process has written.

    Attributes:
        step: the number of training steps that it contains.
        path: where it is.
    """

    step: int
    path: str


class ServerFigures(msgspec.Struct, frozen=True):
    """The work of a parameter server.

    Attributes:
        version: of the values; it grows with every update.
        workers: how many workers are connected.
    """

    version: int
    workers: int


class GpuFigures(msgspec.Struct, frozen=True):
    """The present load of a GPU.

    Attributes:
        index: of the GPU on its host.
        name: of its model.
        utilization: the fraction of the time that it computes.
        memory, memory_total: bytes in use, and in total.
    """

    index: int
    name: str
    utilization: float
    memory: int
    memory_total: int


class WorkerFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process's figures since it started, unless noted otherwise.

    Attributes:
        computed_s, waited_s: seconds outside of collectives and inside them, from when it had joined its job.
        steps: training steps.
        samples: that this process has trained on in these steps.
        bytes_sent: in collectives, through shared memory or links.
        bytes_on_links: the part of it that went over links.
        memory: bytes of main memory that the process occupies now; 0 if unknown.
        gpu: of the GPU that it computes on; None if unknown.
        total_epochs: of the present `fit`; None before.
        logs: the present loss and metrics; None for one that is not finite.
        finished_epoch: the last one; None before.
        checkpoint: the last one; None before.
        server: of a parameter server.
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
        """The figures of the time since the earlier ones; without momentary values."""
        return WorkerFigures(
            computed_s=self.computed_s - former.computed_s,
            waited_s=self.waited_s - former.waited_s,
            steps=self.steps - former.steps,
            samples=self.samples - former.samples,
            bytes_sent=self.bytes_sent - former.bytes_sent,
            bytes_on_links=self.bytes_on_links - former.bytes_on_links,
        )


class TaskReport(msgspec.Struct, frozen=True):
    """A task's present activity, about twice a second while there is something new.

    Attributes:
        phase, epoch, step: as in `runtime.progress`.
        age_s: seconds since it began to do that.
        saves_checkpoint: whether it can be asked for a checkpoint.
        figures: None if there are no newer ones than those reported before.
    """

    phase: str
    epoch: int | None
    step: int | None
    age_s: float
    saves_checkpoint: bool = False
    figures: WorkerFigures | None = None
