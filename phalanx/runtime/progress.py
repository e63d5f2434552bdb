"""What a worker is doing, so that its launcher can report it when the worker no longer can.

The record is a few pages of memory shared with the launcher, which creates it (with a magic number, so that a wrong
file is never written to) and names it in PHALANX_PROGRESS_FILE. A report is one store of 80 bytes: no system call, no
lock, under 2 us. The launcher can read it after the worker's death; a pipe would need a reader that keeps up.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import time
from dataclasses import dataclass

from phalanx.config.environment import process_environment
from phalanx.config.environment_variables import PROGRESS_FILE
from phalanx.monitoring.preparation import IMPORT_OF as IMPORT_OF

MAGIC = b"phalanx progress"
RECORD_BYTES = 16384
PHASE_BYTES = 40
_NONE = -1
# number, time, epoch, step, phase, the same number again: a reader that sees two different numbers met a
# record that was just being written.
_RECORD = struct.Struct(f"<Qdqq{PHASE_BYTES}sQ")
_OFFSET = len(MAGIC)
# Behind the record: whether the worker answers SIGTERM by saving a checkpoint.
_SAVES_CHECKPOINT = 1024
# How often the launcher has asked for a checkpoint: the one field that it writes.
_NUMBER = struct.Struct("<Q")
_SAVE_REQUESTS_OFFSET = 1032
# And the figures of the worker (`worker_figures`), encoded: number, length, content, the same number again.
_FIGURES = struct.Struct("<QI")
_FIGURES_OFFSET = 2048
_FIGURES_BYTES = RECORD_BYTES - _FIGURES_OFFSET - _FIGURES.size - _NUMBER.size


@dataclass(frozen=True, slots=True)
class Progress:
    """The last report of a worker.

    Attributes:
        phase: the operation it was in, for example `all_reduce`.
        epoch, step: position in the training; None outside of it.
        time: when, in seconds since 1970 by that host's clock.
    """

    phase: str
    epoch: int | None
    step: int | None
    time: float


class _Reporter:
    """Writes this process's record; does nothing without a launcher."""

    def __init__(self, path: str | None):
        self._record = _map(path) if path else None
        self._number = self._figures_number = 0
        self._epoch: int | None = None
        self._step: int | None = None
        self.steps = 0  # of training that were reported; may be read from any thread
        self._phases: dict[str, bytes] = {}

    def report(self, phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
        if step is not None and (step != self._step or epoch != self._epoch):
            self.steps += 1
        self._epoch, self._step = epoch, step
        self.enter(phase)

    def enter(self, phase: str) -> None:
        record = self._record
        if record is None:
            return
        epoch, step = self._epoch, self._step
        name = self._phases.get(phase)
        if name is None:
            name = self._phases[phase] = phase.encode(errors="replace")[:PHASE_BYTES]
        self._number = number = self._number + 1
        # One call, which keeps the interpreter's lock: reports of several threads do not mix.
        _RECORD.pack_into(
            record,
            _OFFSET,
            number,
            time.time(),
            _NONE if epoch is None else epoch,
            _NONE if step is None else step,
            name,
            number,
        )

    def write_figures(self, content: bytes) -> None:
        record = self._record
        if record is None or len(content) > _FIGURES_BYTES:
            return
        self._figures_number = number = self._figures_number + 1
        start = _FIGURES_OFFSET + _FIGURES.size
        # In this order: until the last number is there, the content lies between two that differ. Only one thread at a
        # time writes figures (`telemetry._writing`).
        _FIGURES.pack_into(record, _FIGURES_OFFSET, number, len(content))
        record[start : start + len(content)] = content
        _NUMBER.pack_into(record, start + len(content), number)

    def set_saves_checkpoint(self, saves: bool) -> None:
        if self._record is not None:
            self._record[_SAVES_CHECKPOINT] = saves


_reporter: _Reporter | None = None


def report(phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
    """Report what this process is doing now; replaces the last report.

    Args:
        phase: the operation, up to 40 bytes of UTF-8 (the rest is cut off).
        epoch, step: position in the training, 0 or more.
    """
    _get_reporter().report(phase, epoch=epoch, step=step)


def enter(phase: str) -> None:
    """Report that this process now does something else in the same epoch and step."""
    _get_reporter().enter(phase)


def latest() -> Progress | None:
    """The last report of this process; None if there is none, or no launcher."""
    record = _get_reporter()._record
    return None if record is None else parse(record[:])


def steps() -> int:
    """The number of training steps that this process has reported, over all epochs."""
    return _get_reporter().steps


def has_launcher() -> bool:
    """Whether this process has a launcher."""
    return _get_reporter()._record is not None


def write_figures(content: bytes) -> None:
    """Replace the figures that the launcher reads; those that are too long are left out."""
    _get_reporter().write_figures(content)


def save_requests() -> int:
    """How often the launcher has asked this process for a checkpoint."""
    record = _get_reporter()._record
    return 0 if record is None else int(_NUMBER.unpack_from(record, _SAVE_REQUESTS_OFFSET)[0])


def set_saves_checkpoint(saves: bool) -> None:
    """Report whether this process answers SIGTERM by saving a checkpoint, and so needs some time."""
    _get_reporter().set_saves_checkpoint(saves)


def parse_saves_checkpoint(content: bytes) -> bool:
    """Whether a file's content says that its worker answers SIGTERM by saving a checkpoint."""
    return len(content) > _SAVES_CHECKPOINT and content.startswith(MAGIC) and bool(content[_SAVES_CHECKPOINT])


def _get_reporter() -> _Reporter:
    global _reporter
    if _reporter is None:
        _reporter = _Reporter(process_environment().get(PROGRESS_FILE))
    return _reporter


def blank() -> bytes:
    """The content with which a launcher creates the file."""
    return MAGIC.ljust(RECORD_BYTES, b"\0")


def parse(content: bytes) -> Progress | None:
    """The report in a file's content; None if there was none yet, or it was being written at this moment."""
    if len(content) < _OFFSET + _RECORD.size or not content.startswith(MAGIC):
        return None
    number, when, epoch, step, phase, again = _RECORD.unpack_from(content, _OFFSET)
    if number == 0 or number != again:
        return None
    return Progress(
        phase=phase.rstrip(b"\0").decode(errors="replace"),
        epoch=None if epoch == _NONE else epoch,
        step=None if step == _NONE else step,
        time=when,
    )


def parse_figures(content: bytes) -> tuple[int, bytes] | None:
    """The number of the last figures in a file's content, and the figures; None if there are none yet, or they were
    being written at this moment.

    A copy that is interrupted between its first number and its last may hold parts of two figures, which need not be a
    message: both ends go through the page upwards.
    """
    if len(content) < RECORD_BYTES:
        return None
    number, length = _FIGURES.unpack_from(content, _FIGURES_OFFSET)
    start = _FIGURES_OFFSET + _FIGURES.size
    if not number > 0 or length > _FIGURES_BYTES:
        return None
    again = _NUMBER.unpack_from(content, start + length)[0]
    return (number, content[start : start + length]) if number == again else None


def request_save(fd: int) -> None:
    """As the launcher: ask the worker whose file this is for a checkpoint."""
    (requests,) = _NUMBER.unpack(os.pread(fd, _NUMBER.size, _SAVE_REQUESTS_OFFSET))
    os.pwrite(fd, _NUMBER.pack(requests + 1), _SAVE_REQUESTS_OFFSET)


def _map(path: str) -> mmap.mmap | None:
    # The name is inherited by everything the worker starts, where /dev/fd/7 may be another file or none:
    # hence the checks, and silence where they fail.
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != RECORD_BYTES:
            return None
        record = mmap.mmap(fd, RECORD_BYTES)
        if record[: len(MAGIC)] != MAGIC:
            record.close()
            return None
        return record
    except OSError:
        return None
    finally:
        os.close(fd)
