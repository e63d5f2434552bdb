"""Records what a worker is doing, so that its launcher can report it when the worker no longer can.

The record is a few pages of memory shared with the launcher, which creates it (with a magic number, so that no other
file is written by mistake) and names it in PHALANX_PROGRESS_FILE. A report is one store of 80 bytes: no system call, no
lock, under 2 us. The launcher can read it after the worker's death. A pipe would need a reader that keeps up.
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
# number, time, epoch, step, phase, the same number again. Two different numbers show a reader that the record was being
# written.
_RECORD = struct.Struct(f"<Qdqq{PHASE_BYTES}sQ")
_OFFSET = len(MAGIC)
# After the record: whether the worker answers SIGTERM by saving a checkpoint.
_SAVES_CHECKPOINT = 1024
# Number of checkpoints that the launcher has requested: the only field that it writes.
_NUMBER = struct.Struct("<Q")
_SAVE_REQUESTS_OFFSET = 1032
# Then the encoded figures of the worker (`worker_figures`): number, length, content, the same number again.
_FIGURES = struct.Struct("<QI")
_FIGURES_OFFSET = 2048
_FIGURES_BYTES = RECORD_BYTES - _FIGURES_OFFSET - _FIGURES.size - _NUMBER.size


@dataclass(frozen=True, slots=True)
class Progress:
    """The last report of a worker.

    Attributes:
        phase: The operation it was in, for example `all_reduce`.
        epoch, step: Position in the training; None outside of it.
        time: Time of the report, in seconds since 1970 by that host's clock.
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
        self.steps = 0  # number of training steps reported; may be read from any thread
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
        # One call, which holds the GIL, so that reports of several threads do not mix.
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
        # In this order: until the last number is written, the numbers around the content differ. Only one thread at a
        # time writes figures (`telemetry._writing`).
        _FIGURES.pack_into(record, _FIGURES_OFFSET, number, len(content))
        record[start : start + len(content)] = content
        _NUMBER.pack_into(record, start + len(content), number)

    def set_saves_checkpoint(self, saves: bool) -> None:
        if self._record is not None:
            self._record[_SAVES_CHECKPOINT] = saves


_reporter: _Reporter | None = None


def report(phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
    """Report the current operation of this process. Replaces the last report.

    Args:
        phase: The operation, truncated to 40 bytes of UTF-8.
        epoch, step: Position in the training, 0 or more.
    """
    _get_reporter().report(phase, epoch=epoch, step=step)


def enter(phase: str) -> None:
    """Report a new operation in the same epoch and step."""
    _get_reporter().enter(phase)


def latest() -> Progress | None:
    """The last report of this process; None without a report or a launcher."""
    record = _get_reporter()._record
    return None if record is None else parse(record[:])


def steps() -> int:
    """Number of training steps that this process has reported, over all epochs."""
    return _get_reporter().steps


def has_launcher() -> bool:
    """Whether this process has a launcher."""
    return _get_reporter()._record is not None


def write_figures(content: bytes) -> None:
    """Replace the figures that the launcher reads. Figures that are too long are dropped."""
    _get_reporter().write_figures(content)


def save_requests() -> int:
    """Number of checkpoints that the launcher has requested from this process."""
    record = _get_reporter()._record
    return 0 if record is None else int(_NUMBER.unpack_from(record, _SAVE_REQUESTS_OFFSET)[0])


def set_saves_checkpoint(saves: bool) -> None:
    """Report whether this process answers SIGTERM by saving a checkpoint, which takes time."""
    _get_reporter().set_saves_checkpoint(saves)


def parse_saves_checkpoint(content: bytes) -> bool:
    """Whether, by the file's content, its worker answers SIGTERM by saving a checkpoint."""
    return len(content) > _SAVES_CHECKPOINT and content.startswith(MAGIC) and bool(content[_SAVES_CHECKPOINT])


def _get_reporter() -> _Reporter:
    global _reporter
    if _reporter is None:
        _reporter = _Reporter(process_environment().get(PROGRESS_FILE))
    return _reporter


def blank() -> bytes:
    """Initial content of the file."""
    return MAGIC.ljust(RECORD_BYTES, b"\0")


def parse(content: bytes) -> Progress | None:
    """The report in a file's content; None if there is none yet or it was being written."""
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
    """The number of the last figures in a file's content, and the figures; None if there are none yet or they were
    being written.

    A copy that is interrupted between its first and its last number may contain parts of two messages and not decode:
    writer and reader both go through the page upwards.
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
    """Request a checkpoint from the worker with this file. Called by the launcher."""
    (requests,) = _NUMBER.unpack(os.pread(fd, _NUMBER.size, _SAVE_REQUESTS_OFFSET))
    os.pwrite(fd, _NUMBER.pack(requests + 1), _SAVE_REQUESTS_OFFSET)


def _map(path: str) -> mmap.mmap | None:
    # Everything that the worker starts inherits the name, but there /dev/fd/7 may be another file or none. Hence the
    # checks, and silence if they fail.
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
