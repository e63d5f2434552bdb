"""Where a worker says what it is doing, so that its launcher can tell when it no longer can.

The record is one small page of memory shared with the launcher, which creates it (with a magic number, so
that a wrong file is never written to) and names it in PHALANX_PROGRESS_FILE. A report is one store of 80
bytes: no system call, no lock, under 2 us. The launcher reads it after a worker's death as well, which a pipe
would not allow without a reader that keeps up.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import time
from dataclasses import dataclass

from phalanx.config.environment import process_environment
from phalanx.config.variables import PROGRESS_FILE

MAGIC = b"phalanx progress"
RECORD_BYTES = 4096
PHASE_BYTES = 40
_NONE = -1
# number, time, epoch, step, phase, the same number again: a reader that sees two different numbers met a
# record that was just being written.
_RECORD = struct.Struct(f"<Qdqq{PHASE_BYTES}sQ")
_OFFSET = len(MAGIC)
# Behind the record: whether the worker takes a checkpoint when it is told to end.
_HEEDS = 1024
# And how long the worker has computed and waited for the others: number, two times, steps, the number again.
_PACE = struct.Struct("<QddqQ")
_PACE_OFFSET = 2048


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker reported last.

    Attributes:
        phase: the operation it was in, for example `all_reduce`.
        epoch, step: where in the training; None outside of it.
        time: when, in seconds since 1970 by that host's clock.
    """

    phase: str
    epoch: int | None
    step: int | None
    time: float

    def describe(self) -> str:
        where = [f"epoch {self.epoch}"] if self.epoch is not None else []
        where += [f"step {self.step}"] if self.step is not None else []
        return ", ".join([self.phase, *where])


@dataclass(frozen=True, slots=True)
class ProgressTotals:
    """What a worker has done since it began.

    Attributes:
        number: of this note, growing.
        computed_s, waited_s: seconds outside of collectives and in them.
        steps: of training.
    """

    number: int
    computed_s: float
    waited_s: float
    steps: int


class _Reporter:
    """Writes this process's record; does nothing where no launcher listens."""

    def __init__(self, path: str | None):
        self._record = _map(path) if path else None
        self._number = 0
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

    def note(self, totals: ProgressTotals) -> None:
        if self._record is not None:
            number = totals.number
            _PACE.pack_into(
                self._record, _PACE_OFFSET, number, totals.computed_s, totals.waited_s, totals.steps, number
            )

    def heeds_signals(self, heeds: bool) -> None:
        if self._record is not None:
            self._record[_HEEDS] = heeds


_reporter: _Reporter | None = None


def report(phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
    """Say what this process is doing now; the record of before is replaced.

    Args:
        phase: the operation, up to 40 bytes of UTF-8 (the rest is cut off).
        epoch, step: where in the training, 0 or more.
    """
    _the_reporter().report(phase, epoch=epoch, step=step)


def enter(phase: str) -> None:
    """Say that this process now does something else in the same epoch and step."""
    _the_reporter().enter(phase)


def latest() -> Progress | None:
    """What this process has reported last; None if there is nothing, or no launcher."""
    record = _the_reporter()._record
    return None if record is None else parse(record[:])


def steps() -> int:
    """How many steps of training this process has reported, over all epochs."""
    return _the_reporter().steps


def is_read() -> bool:
    """Whether this process has a launcher."""
    return _the_reporter()._record is not None


def note(totals: ProgressTotals) -> None:
    """Say how long this process has computed and waited."""
    _the_reporter().note(totals)


def heeds_signals(heeds: bool) -> None:
    """Say whether this process, told to end by a signal, takes a checkpoint first and so needs some time."""
    _the_reporter().heeds_signals(heeds)


def parse_heeds(content: bytes) -> bool:
    """Whether a file's content says so."""
    return len(content) > _HEEDS and content.startswith(MAGIC) and bool(content[_HEEDS])


def _the_reporter() -> _Reporter:
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


def parse_totals(content: bytes) -> ProgressTotals | None:
    """What is noted in a file's content; None if nothing is, or it was being written at this moment."""
    if len(content) < _PACE_OFFSET + _PACE.size:
        return None
    number, computed_s, waited_s, steps, again = _PACE.unpack_from(content, _PACE_OFFSET)
    return ProgressTotals(number, computed_s, waited_s, steps) if 0 < number == again else None


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
