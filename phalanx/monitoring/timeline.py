"""What each rank does when, recorded for people: one file in the Chrome trace event format for all ranks.

Theory
------
*One clock.* Times are those of the monotonic clock of the host on which the file lies: processes of one host share it,
whatever happens to the time of day. Other hosts measure their clock offset (`phalanx.cluster.timeline_relay`).

*One file, valid at any time.* Recorded events wait in memory. Twice a second a thread of each process overwrites the
file's last bracket with the new events and a new bracket, under a lock of the file. So nothing has to be merged at the
end, the file is valid JSON after each write, and a killed rank loses its last half second at most. Ranks of other hosts
send their events to one that can write.

*No cost if nothing is recorded.* `current` is then a `TimelineRecorder` whose methods do nothing. Callers that have
more to do for an event than a call check `current.on` first.

A rank is a process of the trace, its tracks are the threads. Events of one track follow each other or are nested.

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
"""The track of the phases of a step, which follow each other."""
COLLECTIVES = "collectives"
"""The track of collectives, with waiting and fusing nested in them."""
CHECKPOINTS = "checkpoints"
"""The track of checkpoints that are written in the background."""
MEMBERSHIP = "membership"
"""The track of membership changes."""

FLUSH_S = 0.5
"""How long an event waits in memory at most, and so what a killed rank loses."""
LOCK_S = 5.0
"""How long another process, which may be stopped, may write. Then the events wait for the next flush."""
LOCK_POLL_S = 0.005
PATIENCE_S = 10.0
"""How long the end of the process waits for a write in progress."""
MAX_WAITING = 500_000
"""The most events that wait in memory (100 MB) while the file system or another host is slow; more are dropped."""
_END = b"\n]\n"
_TAIL_BYTES = 1 << 20

Args = Mapping[str, Any]
now = time.monotonic_ns
"""The clock of events. `time.monotonic()` is the same one in seconds."""


class TimelinePart(NamedTuple):
    """A part of an operation that `TimelineRecorder.across` records.

    Attributes:
        ended_ns: when it ended, by `now()`.
    """

    name: str
    ended_ns: int
    args: Args | None = None


class TimelineRecorder:
    """Records nothing. `TimelineSinkRecorder` does.

    Attributes:
        on: whether anything is recorded.
        marks_cycles: whether negotiation rounds of Horovod are recorded as well.
    """

    on = False
    marks_cycles = False

    def enter(self, phase: str, **args: Any) -> None:
        """A phase of a step begins on the track `TRAINING`; the one before it ends."""

    def leave(self) -> None:
        """The present phase of a step ends."""

    def complete(self, track: str, name: str, started_ns: int, args: Args | None = None) -> None:
        """An event that began at `started_ns` (by `now()`) has just ended."""

    def instant(self, track: str, name: str, args: Args | None = None) -> None:
        """An event without duration has happened."""

    def across(self, line: str, started_ns: int, parts: Sequence[TimelinePart]) -> None:
        """An operation ran that may overlap with others of its kind, so each `line` of the view is a separate one.

        Args:
            parts: the parts of the operation, which follow each other.
        """

    @contextmanager
    def span(self, track: str, name: str, args: Args | None = None) -> Iterator[None]:
        """Records what happens inside as one event."""
        started = now()
        try:
            yield
        finally:
            self.complete(track, name, started, args)


class TimelineSink(Protocol):
    """Where events are written."""

    def write(self, events: Sequence[bytes]) -> bool:
        """Write encoded events. Returns False if that is not possible yet, so that the caller tries again later.

        Raises: OSError if it will never be possible.
        """
        ...

    def close(self) -> None: ...


class _Event(msgspec.Struct, omit_defaults=True):
    """An event of the format; times in microseconds."""

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
    """Records into a sink, which a thread writes to.

    Args:
        sink: where events are written; closed by `stop`.
        rank: number of this process in the trace.
        name: name of this process in the trace.
        offset_ns: nanoseconds to add to this host's clock.
        marks_cycles: see `TimelineRecorder`.
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
        self._phase: tuple[str, int, Args] | None = None  # that runs: name, beginning, args; of the training thread
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
        # Viewers name a line after its first event, and would show equal ids of several ranks in one line.
        ident = f"{self._rank} {line}"
        self._add(("b", line, 0, started_ns, 0, None, ident))
        for part in parts:
            self._add(("b", part.name, 0, started_ns, 0, part.args, ident))
            self._add(("e", part.name, 0, part.ended_ns, 0, None, ident))
            started_ns = part.ended_ns
        self._add(("e", line, 0, started_ns, 0, None, ident))

    def stop(self) -> None:
        """Write what is left and stop. Safe to call twice."""
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
        number = self._tracks.get(track)  # without the lock: tracks are only added
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
            # The list stays: another thread may be between reading the attribute and its append.
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
    """Lock a file for this process; whether that succeeded in time. A process that holds the lock may be stopped."""
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
    """Adds events to a file that `create` has created, together with other processes of this host.

    Args:
        path: the file.
        job: the job that the file must belong to. Until there is such a file, events wait.
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
            # The lock is released when the descriptor is closed, also when this process dies.
            if not _lock_file(file, LOCK_S) or os.pread(file, len(self._header), 0) != self._header:
                return False
            content = b"".join(b",\n" + event for event in events) + _END
            _write_at(file, _end_of_events(file), content)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile holds the file open, and with it the lock
            os.close(file)
        return True

    def close(self) -> None:
        """See `TimelineSink.close`."""


current: TimelineRecorder = TimelineRecorder()
"""The recorder of this process."""
_lock = threading.Lock()  # protects the replacement of `current`


def create(path: Path, job: str, *, overwrite: bool = False) -> None:
    """Create the file. An existing file of the same job stays, unless it is to be replaced (`overwrite`).

    Raises: ConfigurationError if it cannot be written.
    """
    header = _header(job)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            if job and not overwrite and file.read(len(header)) == header:
                return
        temporary.write_bytes(header + _END)
        os.replace(temporary, path)  # processes that still write to the old file do no harm
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigurationError(
            f"The timeline {str(path)!r} cannot be written: {error.strerror or error}. Name a file in a folder that "
            f"exists."
        ) from error


def start(recorder: TimelineSinkRecorder) -> None:
    """Record events from now on.

    Raises: ValueError if this process records already.
    """
    global current
    with _lock:
        if current.on:
            raise ValueError("The timeline has been started already; stop it first.")
        current = recorder
    recorder.start()
    atexit.register(stop)


def stop() -> None:
    """Stop recording. Does nothing if nothing is recorded."""
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
    """A forked process has no thread that writes."""
    global current, _lock
    current, _lock = TimelineRecorder(), threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _header(job: str) -> bytes:
    about = msgspec.json.encode({"name": "phalanx", "ph": "M", "pid": 0, "tid": 0, "args": {"job": job}})
    return b"[\n" + about


def _end_of_events(file: int) -> int:
    """The position behind the last whole event. A killed writer may have left a part of one."""
    size = os.fstat(file).st_size
    if os.pread(file, len(_END), size - len(_END)) == _END:
        return size - len(_END)
    # A line that ends with a brace ends an event, since JSON escapes the line breaks within one.
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
    except OSError:  # a full disk; there was room for this end before
        os.ftruncate(file, start)
        os.pwrite(file, _END, start)
        raise
    os.ftruncate(file, position)
