"""The state of a job as users see it, and how each event changes it. Pure: state and event in, state out.

The launcher keeps the state of its job. Programs that show a job read it from the launcher or rebuild it from
`events.jsonl`. Its size is bounded, however long the job runs: curves are thinned, and lists keep their newest entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import msgspec
from msgspec.structs import replace

from phalanx.config.task_names import count_workers, trains
from phalanx.errors import PreemptedError
from phalanx.monitoring import job_events as events
from phalanx.monitoring.job_endings import RUNNING, STOPPED, SUCCEEDED, describe_ending, status_of
from phalanx.monitoring.job_events import HostStatus, JobEvent
from phalanx.monitoring.preparation import is_preparation
from phalanx.monitoring.worker_figures import GpuFigures, ServerFigures, TaskReport, WorkerFigures

WINDOW_S = 5.0
"""Time window for rates."""
MAX_POINTS = 1200
"""More points than a screen has columns."""
FIRST_INTERVAL_S = 1.0
MAX_FEED = 400
MAX_SPANS = 600
MAX_GENERATIONS = 300
UNREPORTED_S = 5.0
"""A process that sends no report for this long is stopped, or its host is overloaded."""

INFO, GOOD, WARNING, BAD = "info", "good", "warning", "bad"
ACTIONS = ("stop", "checkpoint", "scale", "drain")
"""Actions that users can take on a job."""
NO_RATES = {"steps_per_s": 0.0, "samples_per_s": 0.0, "bytes_per_s": 0.0, "network_bytes_per_s": 0.0}
"""Rates of a job or task that is not running."""


class Sample(msgspec.Struct, frozen=True):
    """Figures of a process at one point in time."""

    at: float
    figures: WorkerFigures


class MemberView(msgspec.Struct, frozen=True):
    """State of a task.

    Attributes:
        host, pid: Location of its current or last process; a pid of 0 means that none has started yet.
        is_running: Whether that process is running.
        is_member: Whether it belongs to the current generation.
        how: Explanation of how the last process ended; empty while it runs.
        has_failed: Whether it ended with its own error.
        starts: Number of times that a process was started for it.
        steps_before: Steps that the job had taken when this process joined.
        phase, epoch, step: Current activity. Epochs, and steps within an epoch, count from 0.
        reported_at: Time of its last report.
        saves_checkpoint: Whether it can save a checkpoint on request.
        steps_per_s, samples_per_s: Rates over the last seconds.
        bytes_per_s, network_bytes_per_s: Rates of bytes sent in collectives: all of them, and those outside shared
            memory.
        updates_per_s: Update rate of a parameter server.
        compute_s, wait_s: Seconds per step over the last seconds; None if it took no step.
        wait_fraction: Fraction of the last seconds spent waiting.
        computed_s, waited_s: Totals over all its processes.
        prepared_s: The part of `computed_s` spent before each process had completed its first step.
        is_preparing: Whether its current process has not completed its first step.
        memory: Memory in bytes; 0 if unknown.
        gpu: GPU that it computes on; None if unknown.
        is_slow: Whether the other tasks wait for it.
        server: Figures of a parameter server; None for other tasks.
        recent: Reports of the last seconds.
    """

    task: str
    rank: int
    host: str = ""
    pid: int = 0
    is_running: bool = False
    is_member: bool = True
    how: str = ""
    has_failed: bool = False
    starts: int = 0
    steps_before: int = 0
    phase: str = ""
    epoch: int | None = None
    step: int | None = None
    reported_at: float = 0.0
    saves_checkpoint: bool = False
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    updates_per_s: float = 0.0
    compute_s: float | None = None
    wait_s: float | None = None
    wait_fraction: float = 0.0
    computed_s: float = 0.0
    waited_s: float = 0.0
    prepared_s: float = 0.0
    is_preparing: bool = False
    memory: int = 0
    gpu: GpuFigures | None = None
    is_slow: bool = False
    server: ServerFigures | None = None
    recent: tuple[Sample, ...] = ()

    @property
    def trains(self) -> bool:
        return trains(self.task)


class Point(msgspec.Struct, frozen=True):
    """State of the job at one point in time.

    Attributes:
        step: Training steps since the job began.
        logs: Loss and metrics.
    """

    at: float
    step: int
    samples_per_s: float
    steps_per_s: float
    bytes_per_s: float
    logs: dict[str, float | None]


class EpochPoint(msgspec.Struct, frozen=True):
    """Logs of an epoch. Epochs count from 0."""

    at: float
    step: int
    epoch: int
    logs: dict[str, float | None]


class FeedItem(msgspec.Struct, frozen=True):
    """An entry of the event feed; `level` is INFO, GOOD, WARNING or BAD."""

    at: float
    level: str
    text: str


class Span(msgspec.Struct, frozen=True):
    """Lifetime of one process of a task; `end` is None while it runs."""

    task: str
    start: float
    end: float | None = None
    level: str = INFO
    how: str = ""


class Generation(msgspec.Struct, frozen=True):
    """A membership and the time at which it was formed."""

    at: float
    number: int
    tasks: tuple[str, ...]


class JobView(msgspec.Struct, frozen=True):
    """Everything that Phalanx displays about a job.

    Attributes:
        started: Event of the last start of the job; None before the first one.
        began_at, ended_at, now: Times of the first and the last event; `ended_at` is 0 while the job runs.
        status: RUNNING, SUCCEEDED, STOPPED or FAILED.
        wanted: Target number of workers.
        members: Tasks by name, in rank order.
        epoch, step: Position of the current or last training step; both count from 0.
        total_epochs: Number of epochs of this `fit`; None if unknown.
        steps, samples, bytes_sent: Totals over all members since the job began.
        restarts: Number of times that the launcher has restarted the whole job.
        logs: Current training loss and metrics.
        history: Points of the curves, at least `interval_s` apart; `thinned` counts how often they were thinned.
        stragglers_seen: Number of times that each task was a straggler.
    """

    started: events.JobStarted | None = None
    began_at: float = 0.0
    ended_at: float = 0.0
    now: float = 0.0
    status: str = RUNNING
    end: events.JobEnded | None = None
    generation: int = 0
    wanted: int = 0
    members: dict[str, MemberView] = {}
    hosts: tuple[HostStatus, ...] = ()
    epoch: int | None = None
    step: int | None = None
    total_epochs: int | None = None
    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    restarts: int = 0
    logs: dict[str, float | None] = {}
    history: tuple[Point, ...] = ()
    interval_s: float = FIRST_INTERVAL_S
    thinned: int = 0
    epochs: tuple[EpochPoint, ...] = ()
    checkpoints: tuple[events.CheckpointWritten, ...] = ()
    feed: tuple[FeedItem, ...] = ()
    spans: tuple[Span, ...] = ()
    generations: tuple[Generation, ...] = ()
    stragglers_seen: dict[str, int] = {}

    @property
    def workers(self) -> list[MemberView]:
        """The running tasks that train."""
        return [member for member in self.members.values() if member.trains and member.is_running]


def replay(stream: Iterable[JobEvent]) -> JobView:
    """Return the state after these events."""
    return reduce(advance, stream, JobView())


def advance(state: JobView, event: JobEvent) -> JobView:
    """Return the state after one more event."""
    state = replace(state, now=max(state.now, event.at))
    match event:
        case events.JobStarted():
            return _job_started(state, event)
        case events.TaskStarted():
            return _task_started(state, event)
        case events.TaskExited():
            return _task_exited(state, event)
        case events.GenerationFormed():
            return _generation_formed(state, event)
        case events.HostsChanged():
            return replace(state, hosts=tuple(event.hosts))
        case events.StragglersChanged():
            return _stragglers_changed(state, event)
        case events.Measured():
            return _measured(state, event)
        case events.WorkersRequested():
            text = f"{count_workers(event.workers)} requested"
            return _tell(replace(state, wanted=event.workers), INFO, text)
        case events.EpochFinished():
            return _epoch_finished(state, event)
        case events.CheckpointWritten():
            state = replace(state, checkpoints=(*state.checkpoints, event)[-MAX_GENERATIONS:])
            return _tell(state, GOOD, f"checkpoint after {event.step} steps: {event.path}")
        case events.Noticed():
            return _tell(state, INFO, event.text)
        case events.JobEnded():
            return _job_ended(state, event)


def why_not(state: JobView, action: str) -> str:
    """Why an action is not possible now; empty if it is.

    Args:
        action: One of `ACTIONS`.
    """
    if state.status != RUNNING:
        return "The job has ended."
    kind = events.FIXED if state.started is None else state.started.kind
    if action == "checkpoint" and not any(member.saves_checkpoint for member in state.workers):
        return "No fit with a phalanx.callbacks.Checkpoint runs now."
    if action in ("scale", "drain") and kind != events.ELASTIC:
        return "The job has a fixed size; --workers MIN:MAX makes it elastic."
    if action == "drain" and sum(not host.is_drained for host in state.hosts) < 2:
        return "The job has no other host."
    return ""


# One function for each kind of event.


def _job_started(state: JobView, event: events.JobStarted) -> JobView:
    is_first = state.started is None
    members = {
        task: replace(state.members.get(task, MemberView(task, rank)), is_running=False, pid=0, how="")
        for rank, task in enumerate(event.tasks)
    }
    state = replace(
        state,
        started=event,
        began_at=event.at if is_first else state.began_at,
        members=members,
        generation=0,
        wanted=event.maximum,
        restarts=state.restarts + (not is_first),
    )
    return state if is_first else _tell(state, WARNING, "the whole job starts again")


def _task_started(state: JobView, event: events.TaskStarted) -> JobView:
    former = state.members.get(event.task, MemberView(event.task, event.rank))
    member = MemberView(
        event.task,
        former.rank,
        host=event.host,
        pid=event.pid,
        is_running=True,
        is_member=state.generation == 0 or not former.trains,  # a worker that joins later waits for a generation
        starts=former.starts + 1,
        steps_before=state.steps,
        computed_s=former.computed_s,
        waited_s=former.waited_s,
        prepared_s=former.prepared_s,
    )
    again = "" if member.starts == 1 else f", for the {_ordinal(member.starts)} time"
    state = _with_member(state, member)
    state = replace(state, spans=(*state.spans, Span(event.task, event.at))[-MAX_SPANS:])
    return _tell(state, INFO, f"{event.task} started on {event.host}, pid {event.pid}{again}")


def _task_exited(state: JobView, event: events.TaskExited) -> JobView:
    member = state.members.get(event.task)
    if member is None:
        return state
    level = INFO if event.code in (0, PreemptedError.exit_code) or event.by_launcher else BAD
    spans = list(state.spans)
    for index in range(len(spans) - 1, -1, -1):  # the last one is that of the current process; it may have been dropped
        if spans[index].task == event.task and spans[index].end is None:
            spans[index] = replace(spans[index], end=event.at, level=level, how=event.how)
            break
    gone = replace(
        member,
        is_running=False,
        how=event.how,
        has_failed=level == BAD,
        is_slow=False,
        is_preparing=False,
        saves_checkpoint=False,
        recent=(),
        **NO_RATES,
    )
    state = replace(_with_member(state, gone), spans=tuple(spans))
    return _tell(state, level, f"{event.task} {event.how}")


def _generation_formed(state: JobView, event: events.GenerationFormed) -> JobView:
    before = state.generations[-1].tasks if state.generations else ()
    joined = [task for task in event.tasks if task not in before] if state.generation else []
    left = [task for task in before if task not in event.tasks] if state.generation else []
    members = {
        task: replace(
            member,
            is_member=task in event.tasks or not member.trains,
            steps_before=state.steps - _steps_taken(member) if task in joined else member.steps_before,
        )
        for task, member in state.members.items()
    }
    formed = Generation(event.at, event.generation, tuple(event.tasks))
    state = replace(
        state,
        generation=event.generation,
        members=members,
        generations=(*state.generations, formed)[-MAX_GENERATIONS:],
    )
    changes = [f"{', '.join(joined)} joined"] if joined else []
    changes += [f"{', '.join(left)} left"] if left else []
    text = f"generation {event.generation}: {count_workers(len(event.tasks))}"
    return _tell(state, WARNING if left else GOOD, "; ".join([text, *changes]))


def _stragglers_changed(state: JobView, event: events.StragglersChanged) -> JobView:
    found = [task for task in event.tasks if task in state.members and not state.members[task].is_slow]
    recovered = [task for task, member in state.members.items() if member.is_slow and task not in event.tasks]
    members = {task: replace(member, is_slow=task in event.tasks) for task, member in state.members.items()}
    seen = {**state.stragglers_seen, **{task: state.stragglers_seen.get(task, 0) + 1 for task in found}}
    state = replace(state, members=members, stragglers_seen=seen)
    for task in found:
        state = _tell(state, WARNING, f"{task} is slow, and the others wait for it")
    for task in recovered:
        state = _tell(state, GOOD, f"{task} recovered")
    return state


def _epoch_finished(state: JobView, event: events.EpochFinished) -> JobView:
    steps = max(state.steps, event.steps)
    point = EpochPoint(event.at, steps, event.epoch, event.logs)
    is_next_running = any(member.epoch is not None for member in state.workers)
    trained = {name: value for name, value in event.logs.items() if not name.startswith("val_")}
    return replace(
        state,
        steps=steps,
        epochs=(*state.epochs, point)[-MAX_POINTS:],
        epoch=state.epoch if is_next_running else event.epoch,
        logs={**state.logs, **trained},  # means over all steps of the epoch; reports of the tasks are slightly older
    )


def _job_ended(state: JobView, event: events.JobEnded) -> JobView:
    status = status_of(event)
    state = replace(_with_last_point(state), status=status, ended_at=event.at, end=event, **NO_RATES)
    level = {SUCCEEDED: GOOD, STOPPED: INFO}.get(status, BAD)
    return _tell(state, level, f"the job ended with exit code {event.code}: {describe_ending(event)}")


def _measured(state: JobView, event: events.Measured) -> JobView:
    # Members take the same steps, and servers make the same updates: the most advanced member determines the steps of
    # the job. (Increments since the last reports cannot be summed, because the reports have different times.) Samples
    # and bytes differ per member and are summed.
    members, samples, sent = dict(state.members), 0, 0
    for task, report in event.reports.items():
        if (former := members.get(task)) is None or not former.is_running:
            continue
        member = members[task] = _continued(former, _reported(former, report, event.at), state.steps)
        gained = _gained(former, member)
        samples, sent = samples + gained.samples, sent + max(0, gained.bytes_sent)
    running = [member for member in members.values() if member.is_running]
    servers = [member for member in running if member.server is not None]
    steps = [member.steps_before + _steps_taken(member) for member in servers or running]
    first = min((m for m in running if m.trains and m.step is not None), key=lambda m: m.rank, default=None)
    totals = (each.figures.total_epochs for each in event.reports.values() if each.figures is not None)
    logs = next((_newer_logs(state, member) for member in running if member.recent), {})
    state = replace(
        state,
        members=members,
        epoch=state.epoch if first is None or first.epoch is None else first.epoch,
        step=state.step if first is None else first.step,
        total_epochs=next((total for total in totals if total is not None), state.total_epochs),
        steps=max([state.steps, *steps]),
        samples=state.samples + samples,
        bytes_sent=state.bytes_sent + sent,
        steps_per_s=max([member.updates_per_s if servers else member.steps_per_s for member in running], default=0.0),
        samples_per_s=sum(member.samples_per_s for member in running),
        bytes_per_s=sum(member.bytes_per_s for member in running),
        network_bytes_per_s=sum(member.network_bytes_per_s for member in running),
        logs=logs or state.logs,
    )
    return _with_point(state, event.at)


def _reported(member: MemberView, report: TaskReport, at: float) -> MemberView:
    member = replace(
        member,
        phase=report.phase,
        epoch=report.epoch,
        step=report.step,
        saves_checkpoint=report.saves_checkpoint,
    )
    figures = report.figures
    steps = _steps_taken(member) if figures is None else figures.steps
    is_preparing = member.server is None and is_preparation(report.phase, steps)
    if figures is None:
        return replace(member, is_preparing=is_preparing)
    last = member.recent[-1].figures if member.recent else WorkerFigures()
    computed_s = figures.computed_s - last.computed_s
    recent = (*(sample for sample in member.recent if sample.at > at - WINDOW_S), Sample(at, figures))
    if is_preparing:  # rates start with the next step
        recent = recent[-1:]
    elif len(recent) == 1 and member.recent:  # a rate needs two samples, however old the other one is
        recent = (member.recent[-1], *recent)
    return replace(
        member,
        reported_at=at,
        **_rates(recent, is_preparing=is_preparing),
        # Figures start at 0 in each process of the task; these totals continue.
        computed_s=member.computed_s + computed_s,
        waited_s=member.waited_s + figures.waited_s - last.waited_s,
        prepared_s=member.prepared_s + (computed_s if is_preparing else 0.0),
        is_preparing=is_preparing,
        memory=figures.memory,
        gpu=figures.gpu,
        server=figures.server,
        recent=recent,
    )


def _rates(recent: tuple[Sample, ...], *, is_preparing: bool) -> dict[str, float | None]:
    """The rates of a member from its reports, oldest first; from a single report, the rates since its start. A member
    that is preparing has no rates."""
    first, last = recent[0], recent[-1]
    gained, passed_s = last.figures.since(first.figures), last.at - first.at
    if len(recent) == 1 and not is_preparing:
        gained = last.figures
        passed_s = gained.computed_s + gained.waited_s
    known_s = gained.computed_s + gained.waited_s
    per_s = 1 / passed_s if passed_s > 0 else 0.0
    servers = first.figures.server, last.figures.server
    version = 0 if servers[0] is None or servers[1] is None else servers[1].version - servers[0].version
    return {
        "steps_per_s": gained.steps * per_s,
        "samples_per_s": gained.samples * per_s,
        "bytes_per_s": max(0, gained.bytes_sent) * per_s,
        "network_bytes_per_s": max(0, gained.bytes_on_links) * per_s,
        "updates_per_s": max(0, version) * per_s,
        "compute_s": gained.computed_s / gained.steps if gained.steps else None,
        "wait_s": gained.waited_s / gained.steps if gained.steps else None,
        "wait_fraction": gained.waited_s / known_s if known_s > 0 else 0.0,
    }


def _gained(former: MemberView, member: MemberView) -> WorkerFigures:
    """Increase of a process's figures between two reports."""
    new = member.recent[-1].figures if member.recent else WorkerFigures()
    return new.since(former.recent[-1].figures if former.recent else WorkerFigures())


def _newer_logs(state: JobView, member: MemberView) -> dict[str, float | None]:
    """The loss and metrics of a member if they are new. After an epoch, the logs of the whole epoch are newer."""
    former, logs = state.members[member.task], member.recent[-1].figures.logs
    is_known = bool(former.recent) and logs == former.recent[-1].figures.logs
    return {} if is_known or (member.epoch is None and state.logs) else logs


def _steps_taken(member: MemberView) -> int:
    """Steps taken by the current process of a member; for a server, its updates."""
    if member.server is not None:
        return member.server.version
    return member.recent[-1].figures.steps if member.recent else 0


def _continued(former: MemberView, member: MemberView, steps: int) -> MemberView:
    """A member after a report. The first version that a restarted server reports is the one that it has restored."""
    is_restored = member.server is not None and member.starts > 1 and not (former.server and former.server.version)
    return replace(member, steps_before=steps - _steps_taken(member)) if is_restored else member


def _with_point(state: JobView, at: float) -> JobView:
    """Add a point to the curves. If there are too many points, drop every second one."""
    # 0.9, because reports arrive at about this interval: a slightly early one must not be skipped.
    if not state.steps or (state.history and at - state.history[-1].at < state.interval_s * 0.9):
        return state
    point = Point(at, state.steps, state.samples_per_s, state.steps_per_s, state.bytes_per_s, state.logs)
    history = (*state.history, point)
    if len(history) <= MAX_POINTS:
        return replace(state, history=history)
    return replace(state, history=history[::2], interval_s=state.interval_s * 2, thinned=state.thinned + 1)


def _with_last_point(state: JobView) -> JobView:
    """End the curves with the last figures, however close they are to the previous point."""
    if not state.history or (state.history[-1].step, state.history[-1].logs) == (state.steps, state.logs):
        return state
    heard_at = max(member.reported_at for member in state.members.values())
    # The current rates are those of the tasks that exited last.
    last = replace(state.history[-1], at=max(heard_at, state.history[-1].at), step=state.steps, logs=state.logs)
    return replace(state, history=(*state.history, last))


def _with_member(state: JobView, member: MemberView) -> JobView:
    members = {**state.members, member.task: member}
    return replace(state, members=dict(sorted(members.items(), key=lambda item: item[1].rank)))


def _tell(state: JobView, level: str, text: str) -> JobView:
    return replace(state, feed=(*state.feed, FeedItem(state.now, level, text))[-MAX_FEED:])


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
