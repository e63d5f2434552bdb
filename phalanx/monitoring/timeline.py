"""Records what each rank does when: one file in the Chrome trace event format for all ranks.

Theory
------
*One clock.* All times use the monotonic clock of the host that stores the file. Processes of one host share it, and
changes of the system time do not affect it. Other hosts measure their clock offset (`phalanx.cluster.timeline_relay`).

*One file, valid at any time.* Events wait in memory. Twice a second, a thread of each process overwrites the file's
closing bracket with the new events and a new bracket, under a file lock. Nothing needs to be merged at the end, the
file is valid JSON after each write, and a killed rank loses at most its last half second. Ranks on other hosts send
their events to a rank that can write.

*No cost if nothing is recorded.* `current` is then a `TimelineRecorder` whose methods do nothing. If an event takes
more than a call to prepare, callers check `current.on` first.

In the trace, a rank is a process, and its tracks are threads. Events of a track follow each other or are nested.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from phalanx.errors import ConfigurationError

_log = logging.getLogger(__name__)

TRAINING = "training"
"""Track of the phases of a step, which follow each other."""
COLLECTIVES = "collectives"
"""Track of collectives, with nested waiting and fusing."""
CHECKPOINTS = "checkpoints"
"""Track of checkpoints that are written in the background."""
MEMBERSHIP = "membership"
"""Track of membership changes."""

FLUSH_S = 0.5
"""Maximum time that an event waits in memory, and so what a killed rank loses."""
LOCK_S = 5.0
"""How long to wait for another writer, which may be stopped. After that, the events wait for the next flush."""
LOCK_POLL_S = 0.005
PATIENCE_S = 10.0
"""How long a process that exits waits for a write in progress."""
MAX_WAITING = 500_000
"""Maximum number of events in memory (100 MB) while the file system or another host is slow; more are dropped."""
_END = b"\n]\n"
_TAIL_BYTES = 1 << 20

Args = Mapping[str, Any]
now = time.monotonic_ns
"""Clock of the events. `time.monotonic()` is the same clock in seconds."""


class TimelinePart(NamedTuple):
    """A part of an operation that `TimelineRecorder.across` records.

    Attributes:
        ended_ns: Time at which it ended, as returned by `now()`.
    """

    name: str
    ended_ns: int
    args: Args | None = None


class TimelineRecorder:
    """Interface of a recorder; records nothing. `TimelineSinkRecorder` records.

    Attributes:
        on: Whether anything is recorded.
        marks_cycles: Whether negotiation cycles of Horovod are recorded as well.
    """

    on = False
    marks_cycles = False

    def enter(self, phase: str, **args: Any) -> None:
        """Begin a phase of a step on the track `TRAINING`, and end the previous one."""

    def leave(self) -> None:
        """End the current phase of a step."""

    def complete(self, track: str, name: str, started_ns: int, args: Args | None = None) -> None:
        """Record an event that began at `started_ns` (by `now()`) and ends now."""

    def instant(self, track: str, name: str, args: Args | None = None) -> None:
        """Record an event without duration."""

    def across(self, line: str, started_ns: int, parts: Sequence[TimelinePart]) -> None:
        """Record an operation that may overlap with others of its kind. Each `line` is a separate line of the view.

        Args:
            line: Name of the line.
            started_ns: Start of the operation, by `now()`.
            parts: Parts of the operation, which follow each other.
        """

    @contextmanager
    def span(self, track: str, name: str, args: Args | None = None) -> Iterator[None]:
        """Context manager that records its body as one event."""
        started = now()
        try:
            yield
        finally:
            self.complete(track, name, started, args)


class TimelineSink(Protocol):
    """Destination of events."""

    def write(self, events: Sequence[bytes]) -> bool:
        """Write encoded events. Return False if writing is not possible yet, so that the caller retries later.

        Raises: OSError if writing will never be possible.
        """
        ...

    def close(self) -> None: ...


class _Event(msgspec.Struct, omit_defaults=True):
    """An event of the trace format. Times are in microseconds."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float = 0.0
    dur: float | None = None
    cat: str = ""
    id: str = ""
    s: str = ""
    args: Args | None = None


_encode = msgspec.json.Encoder(enc_hook=str).encode


class TimelineSinkRecorder(TimelineRecorder):
    """Records events, which a thread writes to a sink.

    Args:
        sink: Destination of events; closed by `stop`.
        rank: Number of this process in the trace.
        name: Name of this process in the trace.
        offset_ns: Nanoseconds to add to this host's clock.
        marks_cycles: See `TimelineRecorder`.
    """

    on = True

    def __init__(self, sink: TimelineSink, rank: int, name: str, *, offset_ns: int = 0, marks_cycles: bool = False):
        self.marks_cycles = marks_cycles
        self._sink = sink
        self._rank = rank
        self._offset_ns = offset_ns
        self._waiting: list[tuple[Any, ...]] = []  # list.append needs no lock
        self._unwritten: list[bytes] = []  # encoded
        self._flushing = threading.Lock()  # protects `_unwritten`, and the order of writes to the sink
        self._tracks: dict[str, int] = {}
        self._new_tracks = threading.Lock()  # protects additions to `_tracks`
        self._phase: tuple[str, int, Args] | None = None  # current phase of the training thread: name, start, args
        self._lost = 0  # events dropped since the last flush
        self._stopped = threading.Event()
        self._describe("process_name", 0, name=name)
        self._describe("process_sort_index", 0, sort_index=rank)
        for track in (TRAINING, COLLECTIVES):
            self._tid(track)
        self._thread = threading.Thread(target=self._run, name="phalanx-timeline", daemon=True)

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def enter(self, phase: str, **args: Any) -> None:
        moment = now()
        self._end_phase(moment)
        self._phase = (phase, moment, args)

    def leave(self) -> None:
        self._end_phase(now())

    def complete(self, track: str, name: str, started_ns: int, args: Args | None = None) -> None:
        self._add(("X", name, self._tid(track), started_ns, now() - started_ns, args))

    def instant(self, track: str, name: str, args: Args | None = None) -> None:
        self._add(("i", name, self._tid(track), now(), 0, args))

    def across(self, line: str, started_ns: int, parts: Sequence[TimelinePart]) -> None:
        # Viewers name a line after its first event, and would merge equal IDs of several ranks into one line.
        ident = f"{self._rank} {line}"
        self._add(("b", line, 0, started_ns, 0, None, ident))
        for part in parts:
            self._add(("b", part.name, 0, started_ns, 0, part.args, ident))
            self._add(("e", part.name, 0, part.ended_ns, 0, None, ident))
            started_ns = part.ended_ns
        self._add(("e", line, 0, started_ns, 0, None, ident))

    def stop(self) -> None:
        """Write the remaining events and stop. Safe to call twice."""
        if self._stopped.is_set():
            return
        self.leave()
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            _log.warning("rank %d is not in the end of the timeline: another process holds the file", self._rank)
            return
        try:
            self._flush()
            if self._unwritten:
                _log.warning("rank %d is not in the timeline: no rank of its host has made the file", self._rank)
        except OSError as error:
            _log.warning("the end of the timeline of rank %d cannot be written: %s", self._rank, error)
        self._sink.close()

    def _end_phase(self, moment: int) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            name, started, args = phase
            self._add(("X", name, self._tid(TRAINING), started, moment - started, args))

    def _add(self, event: tuple[Any, ...]) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(event)
        else:
            self._lost += 1

    def _tid(self, track: str) -> int:
        number = self._tracks.get(track)  # no lock needed: tracks are never removed
        if number is None:
            with self._new_tracks:
                number = self._tracks.setdefault(track, len(self._tracks) + 1)
                self._describe("thread_name", number, name=track)
                self._describe("thread_sort_index", number, sort_index=number)
        return number

    def _describe(self, what: str, tid: int, **args: Any) -> None:
        self._add(("M", what, tid, 0, 0, args))

    def _run(self) -> None:
        while not self._stopped.wait(FLUSH_S):
            try:
                self._flush()
            except OSError as error:
                _log.warning("the timeline of rank %d cannot be written, and ends here: %s", self._rank, error)
                self._stopped.set()
                _replace(self, TimelineRecorder())
                self._sink.close()

    def _flush(self) -> None:
        with self._flushing:
            # Keep the list object: another thread may be between reading the attribute and appending.
            waiting = self._waiting[:]
            del self._waiting[: len(waiting)]
            if self._lost:
                _log.warning("the timeline of rank %d lacks %d events: they came too fast", self._rank, self._lost)
                self._lost = 0
            self._unwritten += map(self._encoded, waiting)
            if self._unwritten and self._sink.write(self._unwritten):
                self._unwritten = []
            elif len(self._unwritten) > MAX_WAITING:
                raise OSError("there is no file for it")

    def _encoded(self, event: tuple[Any, ...]) -> bytes:
        kind, name, tid, started_ns, duration_ns, args, *ident = event
        moment = 0.0 if kind == "M" else (started_ns + self._offset_ns) / 1e3
        found = _Event(name, kind, self._rank, tid, moment, args=args or None)
        if kind == "X":
            found.dur = duration_ns / 1e3
        elif kind == "i":
            found.s = "t"
        elif ident:
            found.id, found.cat = ident[0], "tensors"
        return _encode(found)


def _lock_file(file: int, within_s: float) -> bool:
    """Lock a file. Return whether this succeeded in time, because a process that holds the lock may be stopped."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_POLL_S)


class TimelineFileSink:
    """Appends events to a file that `create` has created. Other processes of this host write to the same file.

    Args:
        path: Timeline file.
        job: Job that the file must belong to. Events wait until such a file exists.
    """

    def __init__(self, path: Path, job: str):
        self._path = path
        self._header = _header(job)

    def write(self, events: Sequence[bytes]) -> bool:
        """See `TimelineSink.write`."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # Closing the descriptor releases the lock, also if this process is killed.
            if not _lock_file(file, LOCK_S) or os.pread(file, len(self._header), 0) != self._header:
                return False
            content = b"".join(b",\n" + event for event in events) + _END
            _write_at(file, _end_of_events(file), content)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile keeps the file open, and with it the lock
            os.close(file)
        return True

    def close(self) -> None:
        """See `TimelineSink.close`."""


current: TimelineRecorder = TimelineRecorder()
"""The recorder of this process."""
_lock = threading.Lock()  # protects the replacement of `current`


def create(path: Path, job: str, *, overwrite: bool = False) -> None:
    """Create the file. Keep an existing file of the same job, unless `overwrite` is set.

    Raises: ConfigurationError if it cannot be written.
    """
    header = _header(job)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            if job and not overwrite and file.read(len(header)) == header:
                return
        temporary.write_bytes(header + _END)
        os.replace(temporary, path)  # processes that still write to the old file do not matter
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigurationError(
            f"The timeline {str(path)!r} cannot be written: {error.strerror or error}. Name a file in a folder that "
            f"exists."
        ) from error


def start(recorder: TimelineSinkRecorder) -> None:
    """Start recording.

    Raises: ValueError if this process is already recording.
    """
    global current
    with _lock:
        if current.on:
            raise ValueError("The timeline has been started already; stop it first.")
        current = recorder
    recorder.start()
    atexit.register(stop)


def stop() -> None:
    """Stop recording, if it has been started."""
    global current
    with _lock:
        recorder, current = current, TimelineRecorder()
    if isinstance(recorder, TimelineSinkRecorder):
        recorder.stop()
        atexit.unregister(stop)


def _replace(recorder: TimelineRecorder, other: TimelineRecorder) -> None:
    global current
    with _lock:
        if current is recorder:
            current = other


def _forget() -> None:
    """Stop recording in a forked process, which has no writer thread."""
    global current, _lock
    current, _lock = TimelineRecorder(), threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _header(job: str) -> bytes:
    about = msgspec.json.encode({"name": "phalanx", "ph": "M", "pid": 0, "tid": 0, "args": {"job": job}})
    return b"[\n" + about


def _end_of_events(file: int) -> int:
    """Position after the last complete event. A killed writer may have left an incomplete one."""
    size = os.fstat(file).st_size
    if os.pread(file, len(_END), size - len(_END)) == _END:
        return size - len(_END)
    # A closing brace at the end of a line ends an event, because JSON escapes line breaks within events.
    start = max(0, size - _TAIL_BYTES)
    tail = os.pread(file, size - start, start)
    whole = tail.rfind(b"}\n")
    whole = max(whole, tail.rfind(b"},\n"))
    if whole < 0:
        raise OSError("the file has been changed by others")
    return start + whole + 1


def _write_at(file: int, position: int, content: bytes) -> None:
    view, start = memoryview(content), position
    try:
        while view:
            written = os.pwrite(file, view, position)
            position += written
            view = view[written:]
    except OSError:  # the disk is full; `_END` was there before, so it fits
        os.ftruncate(file, start)
        os.pwrite(file, _END, start)
        raise
    os.ftruncate(file, position)
