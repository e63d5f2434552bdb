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
from typing import Any, NamedTuple, Protocol

import msgspec

from phalanx.monitoring.worker_figures import FinishedEpoch, GpuFigures, SavedCheckpoint, ServerFigures, WorkerFigures
from phalanx.runtime import progress

BEAT_S = 0.5
MAX_LOGS = 40
"""The page has room for these; a program with more shows the first."""


class WorkerTraffic(NamedTuple):
    """See `Traffic`."""

    bytes_sent: int
    bytes_on_links: int
    waited_s: float


class Traffic(Protocol):
    """The bytes sent and the time waited so far, as in `WorkerFigures`; `CommunicatorStatistics` is one."""

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_on_links(self) -> int: ...

    @property
    def waited_s(self) -> float: ...


class Telemetry:
    """The figures of this process. Everything here may be written by one thread and read by another.

    Attributes:
        samples: that this process has trained on so far.
        are_logs_due: whether the thread that trains is to call `record_logs` after its present step.
        checkpoint: the last one that this process has written.
        is_save_requested: whether someone who watches the job wants a checkpoint now.
        read_gpu: gives the figures of the GPU that this process computes on, if any is known.
        read_server: gives the figures of the parameter server in this process, if there is one.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.are_logs_due = self._has_measured = False
        self.checkpoint: SavedCheckpoint | None = None
        self.is_save_requested = False
        self.read_server: Callable[[], ServerFigures] | None = None
        self.read_gpu: Callable[[], GpuFigures | None] | None = None
        # Replaced as a whole and never changed, so that a reader needs no lock.
        self._logs: dict[str, float | None] = {}
        self._finished_epoch: FinishedEpoch | None = None
        self._read_traffic: Callable[[], Traffic] | None = None
        # Of all that was read so far: a process may join another job, whose traffic begins at 0.
        self._waited_s = self._computed_s = 0.0
        self._bytes = 0, 0  # sent, and of these over links
        self._last_at = time.monotonic()
        self._last_traffic: Traffic | None = None

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
        self._last_at = time.monotonic()
        self.are_logs_due = True

    def watch_traffic(self, read: Callable[[], Traffic] | None) -> None:
        """From now on, what this process sends and waits for comes from here; None if it has left its job."""
        self._last_traffic = None
        self._read_traffic = read

    def measure(self) -> WorkerFigures:
        """The figures now. Called regularly, by one thread at a time."""
        self.count()
        self.are_logs_due = self._has_measured = True
        return WorkerFigures(
            computed_s=round(self._computed_s, 6),
            waited_s=round(self._waited_s, 6),
            steps=progress.steps(),
            samples=self.samples,
            bytes_sent=self._bytes[0],
            bytes_on_links=self._bytes[1],
            memory=resident_bytes(),
            gpu=None if self.read_gpu is None else self.read_gpu(),
            logs=self._logs,
            finished_epoch=self._finished_epoch,
            checkpoint=self.checkpoint,
            server=None if self.read_server is None else self.read_server(),
        )

    def count(self) -> None:
        """Add what the process has sent, waited for and computed since the last time. By one thread at a time."""
        read = self._read_traffic  # once: the main thread may leave the job meanwhile
        now, traffic = time.monotonic(), None if read is None else read()
        passed_s, self._last_at = now - self._last_at, now
        before, self._last_traffic = self._last_traffic or WorkerTraffic(0, 0, 0.0), traffic
        if traffic is None:
            self._computed_s += passed_s
            return
        # Collectives in the background count twice, and one that ends just now may be missed once.
        waited_s = min(max(0.0, traffic.waited_s - before.waited_s), passed_s)
        self._waited_s, self._computed_s = self._waited_s + waited_s, self._computed_s + passed_s - waited_s
        sent, on_links = self._bytes
        sent += max(0, traffic.bytes_sent - before.bytes_sent)
        self._bytes = sent, on_links + max(0, traffic.bytes_on_links - before.bytes_on_links)


current = Telemetry()
_announcing_pid: int | None = None
_writing = threading.Lock()  # protects what `measure` remembers, and the order of what is written


def announce(read_traffic: Callable[[], Traffic] | None = None) -> None:
    """Show the figures of this process to its launcher, from now until it ends. Does nothing without a launcher.

    Args:
        read_traffic: what the process sends and waits for; called in another thread.
    """
    global _announcing_pid
    current.watch_traffic(read_traffic)
    if progress.has_launcher() and _announcing_pid != os.getpid():  # a thread does not survive a fork
        _announcing_pid = os.getpid()
        current.start()
        atexit.register(_write)  # what the last beat has missed
        threading.Thread(target=_beat, name="phalanx-telemetry", daemon=True).start()


def leave() -> None:
    """The process leaves its job: what it has sent since the last beat counts, too."""
    if _announcing_pid == os.getpid():  # as in `_write`
        with _writing:
            current.count()
    current.watch_traffic(None)


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
