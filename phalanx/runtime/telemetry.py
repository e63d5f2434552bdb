"""What this process knows of its training, for those who watch the job.

The threads that train store what they have anyway, as attributes of `current`: no step pays more than that. Twice a
second a thread writes it all into the page of memory that the launcher reads (`progress`), until the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from phalanx.monitoring.worker_figures import FinishedEpoch, GpuFigures, SavedCheckpoint, ServerFigures, WorkerFigures
from phalanx.runtime import progress
from phalanx.runtime.traffic_account import Traffic, TrafficAccount

BEAT_S = 0.5
MAX_LOGS = 40
"""The page has room for these; a program with more shows the first."""


class Telemetry:
    """The figures of this process. Everything here may be written by one thread and read by another.

    Attributes:
        traffic: what it sends, and where its time goes.
        samples: that this process has trained on so far.
        total_epochs: of the present `fit`, as its argument `epochs`; None before.
        are_logs_due: whether the thread that trains is to call `record_logs` after its present step.
        checkpoint: the last one that this process has written.
        is_save_requested: whether someone who watches the job wants a checkpoint now.
        read_gpu: gives the figures of the GPU that this process computes on, if any is known.
        read_server: gives the figures of the parameter server in this process, if there is one.
    """

    def __init__(self) -> None:
        self.traffic = TrafficAccount()
        self.samples = 0
        self.total_epochs: int | None = None
        self.are_logs_due = self._has_measured = False
        self.checkpoint: SavedCheckpoint | None = None
        self.is_save_requested = False
        self.read_server: Callable[[], ServerFigures] | None = None
        self.read_gpu: Callable[[], GpuFigures | None] | None = None
        # Replaced as a whole and never changed, so that a reader needs no lock.
        self._logs: dict[str, float | None] = {}
        self._finished_epoch: FinishedEpoch | None = None

    def record_logs(self, logs: Mapping[str, Any]) -> None:
        """Store the present loss and metrics; those of every step until the first beat, for a job that dies early."""
        self.are_logs_due = not self._has_measured
        self._logs = _numbers(logs)

    def record_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Store the logs of an epoch that has ended."""
        self._finished_epoch = FinishedEpoch(epoch, _numbers(logs))

    def start(self) -> None:
        """From now on, time is spent on computing or waiting, and someone reads the figures: the process has joined its
        job."""
        self.traffic.start()
        self.are_logs_due = True

    def measure(self) -> WorkerFigures:
        """The figures now. Called regularly, by one thread at a time."""
        traffic = self.traffic
        traffic.update()
        self.are_logs_due = self._has_measured = True
        return WorkerFigures(
            computed_s=round(traffic.computed_s, 6),
            waited_s=round(traffic.waited_s, 6),
            steps=progress.steps(),
            samples=self.samples,
            bytes_sent=traffic.bytes_sent,
            bytes_on_links=traffic.bytes_on_links,
            memory=resident_bytes(),
            gpu=None if self.read_gpu is None else self.read_gpu(),
            total_epochs=self.total_epochs,
            logs=self._logs,
            finished_epoch=self._finished_epoch,
            checkpoint=self.checkpoint,
            server=None if self.read_server is None else self.read_server(),
        )


current = Telemetry()
_announcing_pid: int | None = None
_writing = threading.Lock()  # protects what `measure` remembers, and the order of what is written


def announce(read_traffic: Callable[[], Traffic] | None = None) -> None:
    """Show the figures of this process to its launcher, from now until it ends. Does nothing without a launcher.

    Args:
        read_traffic: what the process sends and waits for; called in another thread.
    """
    global _announcing_pid
    current.traffic.watch(read_traffic)
    if progress.has_launcher() and _announcing_pid != os.getpid():  # a thread does not survive a fork
        _announcing_pid = os.getpid()
        current.start()
        atexit.register(_write)  # what the last beat has missed
        threading.Thread(target=_beat, name="phalanx-telemetry", daemon=True).start()


def leave() -> None:
    """The process leaves its job: what it has sent since the last beat counts, too."""
    if _announcing_pid == os.getpid():  # as in `_write`
        with _writing:
            current.traffic.update()
    current.traffic.watch(None)


def resident_bytes() -> int:
    """The main memory that this process occupies; 0 where that cannot be known.

    Source: proc(5), the second field of /proc/PID/statm.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return _psutil_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def _psutil_resident_bytes() -> int:
    """Not on Linux, and only with psutil installed."""
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.Process().memory_info().rss)


def _beat() -> None:
    requests = progress.save_requests()  # those made before this process could answer do not count
    while True:
        time.sleep(BEAT_S)
        _write()
        if requests != (requests := progress.save_requests()):
            current.is_save_requested = True


def _write() -> None:
    if _announcing_pid != os.getpid():
        # A fork that exits: the page is its parent's, and the lock may have been held when it was copied.
        return
    with _writing:
        progress.write_figures(msgspec.msgpack.encode(current.measure()))


def _numbers(logs: Mapping[str, Any]) -> dict[str, float | None]:
    """The logs that are single numbers, of any backend; None for one that is not finite, which JSON has no word for."""
    single: dict[str, float | None] = {}
    for name, value in logs.items():
        if len(single) < MAX_LOGS and (getattr(value, "shape", None) == () or isinstance(value, int | float)):
            with contextlib.suppress(TypeError, ValueError, OverflowError):  # Keras lets logs be anything
                number = float(value)
                single[name] = number if math.isfinite(number) else None
    return single
