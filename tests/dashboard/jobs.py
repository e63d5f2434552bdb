"""Views of jobs for the tests of what shows them."""

from __future__ import annotations

from phalanx.monitoring import job_events as events
from phalanx.monitoring.job_events import JobEvent
from phalanx.monitoring.job_view import JobView, replay
from phalanx.monitoring.worker_figures import GpuFigures, ServerFigures, TaskReport, WorkerFigures

TASKS = ["worker/0", "worker/1", "ps/0"]


def job_events(*, program: str = "train.py", ended: int | None = None, page: str = "") -> list[JobEvent]:
    """An elastic job of two workers and a server, which loses a worker and gets it back."""
    stream: list[JobEvent] = [
        events.JobStarted(100.0, "j0b", program, events.ELASTIC, TASKS, 1, 2, "here", 1, "0.1.0"),
        *(events.TaskStarted(101.0, task, rank, "here", 10 + rank) for rank, task in enumerate(TASKS)),
        events.GenerationFormed(102.0, 1, TASKS[:2]),
        *(measured(103.0 + second, 10 * (second + 1)) for second in range(5)),
        events.EpochFinished(108.0, 0, {"loss": 0.5, "val_loss": 0.6}),
        events.CheckpointWritten(108.5, 50, "/there/fit0.weights.h5"),
        events.TaskExited(109.0, "worker/1", 137, "was killed by SIGKILL"),
        events.TaskStarted(109.5, "worker/1", 1, "here", 20),
        events.GenerationFormed(110.0, 2, TASKS[:1]),
    ]
    if ended is not None:
        stream.append(events.JobEnded(111.0, ended, "worker/1 failed" if ended else "over", "worker/1", page))
    return stream


def measured(at: float, steps: int) -> events.Measured:
    worker = WorkerFigures(
        computed_s=0.8 * (at - 102),
        waited_s=0.2 * (at - 102),
        steps=steps,
        samples=32 * steps,
        bytes_sent=1000 * steps,
        memory=10**8,
        gpu=GpuFigures(0, "H100", 0.5, 10**9, 8 * 10**10),
        logs={"loss": 1 / steps, "accuracy": None},
    )
    server = WorkerFigures(server=ServerFigures(3 * steps, 2))
    return events.Measured(
        at,
        {
            "worker/0": TaskReport("update", 0, steps, 0.0, True, worker),
            "worker/1": TaskReport("all_reduce", 0, steps, 0.0, True, worker),
            "ps/0": TaskReport("serves", None, None, 0.0, figures=server),
        },
    )


def job_view(**options: object) -> JobView:
    return replay(job_events(**options))  # type: ignore[arg-type]
