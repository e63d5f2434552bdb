"""Figures about this process's training, for observers of the job.

Training threads store values that they already have as attributes of `current`, which is the only cost of a step. Twice
a second, a thread writes all of them to the page of memory that the launcher reads (`progress`), until the process
ends.
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

PUBLISH_INTERVAL_S = 0.5
MAX_LOGS = 40
"""Number of logs that the page has room for; further ones are dropped."""


class Telemetry:
    """The figures of this process. One thread may write any of them while another reads it.

    Attributes:
        traffic: Account of the bytes sent, and of the time spent computing and waiting.
        samples: Number of samples that this process has trained on so far.
        total_epochs: Argument `epochs` of the current `fit`; None before the first.
        are_logs_due: Whether the training thread is to call `record_logs` after its current step.
        checkpoint: The last checkpoint that this process has written.
        is_save_requested: Whether an observer of the job has requested a checkpoint.
        read_gpu: Returns the figures of the GPU that this process computes on, if any is known.
        read_server: Returns the figures of the parameter server in this process, if there is one.
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
        # Replaced, never modified, so that a reader needs no lock.
        self._logs: dict[str, float | None] = {}
        self._finished_epoch: FinishedEpoch | None = None

    def record_logs(self, logs: Mapping[str, Any]) -> None:
        """Store the current loss and metrics. Until the first `collect`, every step's, for a job that dies early."""
        self.are_logs_due = not self._has_measured
        self._logs = _numbers(logs)

    def record_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Store the logs of a finished epoch."""
        self._finished_epoch = FinishedEpoch(epoch, _numbers(logs))

    def start(self) -> None:
        """Start accounting for time: the process has joined its job, and its figures are read from now on."""
        self.traffic.start()
        self.are_logs_due = True

    def collect(self) -> WorkerFigures:
        """Return the current figures. Called regularly, by one thread at a time."""
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
_publishing_pid: int | None = None
_writing = threading.Lock()  # protects the state of `collect`, and the order of writes


def start_publishing(read_traffic: Callable[[], Traffic] | None = None) -> None:
    """Publish the figures of this process to its launcher until the process ends. Does nothing without a launcher.

    Args:
        read_traffic: Returns what the process has sent and waited for. Called in another thread.
    """
    global _publishing_pid
    current.traffic.watch(read_traffic)
    if progress.has_launcher() and _publishing_pid != os.getpid():  # a thread does not survive a fork
        _publishing_pid = os.getpid()
        current.start()
        atexit.register(_write)  # changes since the last write
        threading.Thread(target=_publish_loop, name="phalanx-telemetry", daemon=True).start()


def stop_publishing() -> None:
    """Stop publishing because the process leaves its job; include what it has sent since the last write."""
    if _publishing_pid == os.getpid():  # as in `_write`
        with _writing:
            current.traffic.update()
    current.traffic.watch(None)


def resident_bytes() -> int:
    """The main memory that this process occupies; 0 if unknown.

    Source: proc(5), the second field of /proc/PID/statm.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return _psutil_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def _psutil_resident_bytes() -> int:
    """The same outside Linux; 0 unless psutil is installed."""
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.Process().memory_info().rss)


def _publish_loop() -> None:
    requests = progress.save_requests()  # earlier requests do not count: this process could not answer them
    while True:
        time.sleep(PUBLISH_INTERVAL_S)
        _write()
        if requests != (requests := progress.save_requests()):
            current.is_save_requested = True


def _write() -> None:
    if _publishing_pid != os.getpid():
        # An exiting fork: the page belongs to its parent, and the lock may have been held during the fork.
        return
    with _writing:
        progress.write_figures(msgspec.msgpack.encode(current.collect()))


def _numbers(logs: Mapping[str, Any]) -> dict[str, float | None]:
    """The logs that are scalars, of any backend. None replaces non-finite values, which JSON cannot express."""
    single: dict[str, float | None] = {}
    for name, value in logs.items():
        if len(single) < MAX_LOGS and (getattr(value, "shape", None) == () or isinstance(value, int | float)):
            with contextlib.suppress(TypeError, ValueError, OverflowError):  # Keras allows any object as a log
                number = float(value)
                single[name] = number if math.isfinite(number) else None
    return single
