"""Converts the reports of a job into events, maintains its view, and writes the events to the log directory."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from phalanx.launcher.failures.root_cause import WorkerExit
from phalanx.launcher.hosts.base_host import WorkerPlacement
from phalanx.launcher.job_observer import JobObserver
from phalanx.launcher.watching.epoch_rounds import EpochRounds
from phalanx.monitoring import job_events as events
from phalanx.monitoring.console import plain_text
from phalanx.monitoring.job_events import HostStatus, JobEvent
from phalanx.monitoring.job_view import JobView, advance
from phalanx.monitoring.worker_figures import FinishedEpoch, SavedCheckpoint, TaskReport
from phalanx.runtime.exit_codes import sendable

MEASUREMENT_INTERVAL_S = 0.5
"""Seconds between two events with the reports of the tasks."""
MAX_RECENT = 500
"""Number of events kept for observers that ask for changes. Those further behind get the whole view."""
FILE_INTERVAL_S = (1.0, 10.0)
"""Seconds between two writes of figures to the file: at first, and after hours, so that a day takes a few MB."""
MAX_FIGURES_IN_FILE = 600
OUTPUT_BYTES = 16 * 1024
"""Size of the end of each task's output that is kept."""


class JobRecorder(JobObserver):
    """See the module docstring. Except where noted, all calls come from the thread that runs the job.

    Args:
        file: File for all events; None to write none.
        clock: Returns seconds since 1970.

    Attributes:
        view: Everything shown about the job.
        number: Number of events so far.
        problem: Error that stopped the writing of events; empty if there was none.
    """

    def __init__(self, file: BinaryIO | None = None, *, clock: Callable[[], float] = time.time):
        self._file = file
        self._clock = clock
        # Held to replace the view, the number and the recent events atomically, for readers in other threads. The only
        # thread that writes them reads them without it.
        self._lock = threading.Lock()
        self._recent: deque[bytes] = deque(maxlen=MAX_RECENT)  # encoded events; the newest has number `number`
        self._reports: dict[str, TaskReport] = {}  # since the last `Measured`, by task
        self._unwritten: dict[str, TaskReport] = {}  # the last report of each task, if newer than the file
        self._measured_at = self._written_at = 0.0
        self._output: dict[int, bytearray] = {}  # by rank
        self._epochs = EpochRounds()
        self._checkpoints: dict[str, SavedCheckpoint] = {}
        self.view = JobView()
        self.number = 0
        self.problem = ""

    def record(self, event: JobEvent) -> None:
        """Record an event."""
        try:
            line = msgspec.json.encode(event)
        except UnicodeEncodeError:  # a path that is not valid text
            event = msgspec.convert(_as_text(msgspec.to_builtins(event)), JobEvent)
            line = msgspec.json.encode(event)
        if isinstance(event, events.JobStarted):
            self._epochs.begin_round()
        view = advance(self.view, event)
        with self._lock:
            self.view, self.number = view, self.number + 1
            self._recent.append(line)
        if self._file is not None and self._belongs_in_file(event):
            try:
                _write_whole(self._file, line + b"\n")
            except OSError as error:
                self._file, self.problem = None, error.strerror or str(error)

    def changes(self, after: int) -> tuple[int, list[bytes] | None]:
        """The number of the last event, and the encoded events after number `after`; None if they are no longer kept.
        Thread-safe."""
        with self._lock:
            missing = self.number - after
            if not 0 <= missing <= len(self._recent):
                return self.number, None
            return self.number, list(self._recent)[len(self._recent) - missing :]

    def numbered_view(self) -> tuple[int, JobView]:
        """The number of the last event, and the view that includes it. Thread-safe."""
        with self._lock:
            return self.number, self.view

    def output_of(self, task: str) -> str:
        """The end of a task's output, as a terminal would show it. Thread-safe."""
        member = self.view.members.get(task)
        content = b"" if member is None else bytes(self._output.get(member.rank, b""))
        return plain_text(content)

    def stragglers_changed(self, tasks: Sequence[str]) -> None:
        """Record the tasks that the others wait for."""
        self.record(events.StragglersChanged(self._clock(), list(tasks)))

    # See `JobObserver`.

    def output(self, rank: int, is_error: bool, data: bytes) -> None:
        kept = self._output.setdefault(rank, bytearray())
        kept += data
        if len(kept) > 2 * OUTPUT_BYTES:
            del kept[:-OUTPUT_BYTES]

    def task_started(self, placement: WorkerPlacement, pid: int) -> None:
        self._epochs.forget(placement.task)
        self._checkpoints.pop(placement.task, None)
        self.record(events.TaskStarted(self._clock(), placement.task, placement.spec.rank, placement.host.name, pid))

    def task_exited(self, exit_: WorkerExit) -> None:
        if (left_out := self._unwritten.get(exit_.task)) is not None:  # the last figures belong in the file
            self._reports[exit_.task] = _merged(left_out, self._reports.get(exit_.task, left_out))
        self._written_at = 0.0
        self._flush()
        error = exit_.diagnostics.error
        if error is not None and not exit_.was_preempted and not error.interrupted:  # not printed by the worker
            self.output(exit_.rank, True, error.traceback.encode())
        how = f"{exit_.description}, ended by the launcher" if exit_.was_ended_by_launcher else exit_.description
        self.record(events.TaskExited(self._clock(), exit_.task, exit_.code, how, exit_.was_ended_by_launcher))

    def task_reported(self, task: str, rank: int, report: TaskReport) -> None:
        figures = report.figures
        if figures is not None:
            report = replace(report, figures=replace(figures, finished_epoch=None, checkpoint=None))
        self._reports[task] = _merged(self._reports.get(task), replace(report, age_s=round(report.age_s, 3)))
        if figures is not None:
            self._record_landmarks(task, figures.finished_epoch, figures.checkpoint)
        if not 0 <= self._clock() - self._measured_at < MEASUREMENT_INTERVAL_S * 0.9:  # the clock may be set back
            self._flush()

    def generation_formed(self, generation: int, tasks: Sequence[str]) -> None:
        self.record(events.GenerationFormed(self._clock(), generation, list(tasks)))

    def hosts_changed(self, hosts: Sequence[HostStatus]) -> None:
        self.record(events.HostsChanged(self._clock(), list(hosts)))

    def job_failed(self, exit_: WorkerExit) -> None:
        if exit_.was_preempted:  # all others exit too
            return
        self.message(f"{exit_.failure}; ending the job")

    def exit_survived(self, exit_: WorkerExit, how: str) -> None:
        self.message(f"{exit_.task}: {how}")

    def message(self, text: str) -> None:
        self.record(events.Noticed(self._clock(), text))

    # Internals.

    def _flush(self) -> None:
        """Record the pending reports of the tasks."""
        reports, self._reports = self._reports, {}
        if reports:
            self._measured_at = self._clock()
            self.record(events.Measured(self._measured_at, reports))

    def _record_landmarks(self, task: str, epoch: FinishedEpoch | None, checkpoint: SavedCheckpoint | None) -> None:
        now = self._clock()
        if epoch is not None and self._epochs.is_new(task, epoch):
            self._flush()  # the steps of the epoch before its end
            self.record(events.EpochFinished(now, epoch.epoch, epoch.logs, self.view.steps))
        if checkpoint is not None and checkpoint != self._checkpoints.get(task):
            self._checkpoints[task] = checkpoint
            self.record(events.CheckpointWritten(now, checkpoint.step, checkpoint.path))

    def _belongs_in_file(self, event: JobEvent) -> bool:
        """Whether to write an event: all but most figures, which become rarer over time."""
        if not isinstance(event, events.Measured):
            return True
        shortest_s, longest_s = FILE_INTERVAL_S
        elapsed_s = event.at - self.view.began_at
        if 0 <= event.at - self._written_at < min(longest_s, max(shortest_s, elapsed_s / MAX_FIGURES_IN_FILE)):
            for task, report in event.reports.items():
                self._unwritten[task] = _merged(self._unwritten.get(task), report)
            return False
        for task, report in event.reports.items():
            if report.figures is not None:
                self._unwritten.pop(task, None)
        self._written_at = event.at
        return True


def _merged(older: TaskReport | None, newer: TaskReport) -> TaskReport:
    """The newer of two reports of a task, with the figures of the older one if it has none."""
    return newer if older is None or newer.figures is not None else replace(newer, figures=older.figures)


def _write_whole(file: BinaryIO, line: bytes) -> None:
    """Write a line. Raises: OSError, even if a part is written: a later line would continue that part."""
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _as_text(value: Any) -> Any:
    """The same value with all strings sendable."""
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, dict):
        return {_as_text(key): _as_text(each) for key, each in value.items()}
    return [_as_text(each) for each in value] if isinstance(value, list | tuple) else value
