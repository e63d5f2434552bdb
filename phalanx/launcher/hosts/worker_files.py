"""Files in which a worker leaves information for its launcher. They have no name, so no other process can open them.

Unlike pipes, they need no reader that keeps up, and can be read after the worker's death.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from typing import BinaryIO

from msgspec.structs import replace

from phalanx.errors import FrameError
from phalanx.launcher.host_messages import WorkerDiagnostics, WorkerReport
from phalanx.monitoring.worker_figures import TaskReport, WorkerFigures
from phalanx.runtime import bootstrap, crash_report, progress
from phalanx.transport.decoding import decode_message

MAX_STACK_CHARACTERS = 40_000

_LOST_EXIT_CODE = crash_report.CrashReport(
    kind="ChildProcessError",
    message="it did not come to its end (its exit code is unknown: the program ignores SIGCHLD or waits for any child)",
    traceback="",
)


def open_memory_file() -> BinaryIO:
    """Open an anonymous file, in memory if the system supports it, that no process can leave behind."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("phalanx"), "w+b")
    return open_disk_file()


def open_disk_file() -> BinaryIO:
    """The same on disk, for large content."""
    return tempfile.TemporaryFile()  # type: ignore[return-value]


class WorkerFiles:
    """The files of one worker process.

    Args:
        function: Pickled function; empty if the worker runs a program.
    """

    def __init__(self, function: bytes):
        self.progress, self.stacks, self.error = open_memory_file(), open_memory_file(), open_memory_file()
        self.progress.write(progress.blank())
        self.progress.flush()
        self.call: tuple[BinaryIO, BinaryIO] | None = None  # the function and its result
        if function:
            self.call = open_memory_file(), open_memory_file()
            self.call[0].write(function)
            self.call[0].seek(0)
        self._reported = (0, 0.0)  # number of the figures and time of the progress last reported

    @property
    def call_descriptors(self) -> tuple[int, int]:
        """Descriptors of the function and its result; -1 if there is none."""
        return (-1, -1) if self.call is None else (self.call[0].fileno(), self.call[1].fileno())

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that the worker inherits."""
        found = [self.progress.fileno(), self.stacks.fileno(), self.error.fileno(), *self.call_descriptors]
        return [fd for fd in found if fd >= 0]

    @property
    def has_reported(self) -> bool:
        """Whether the worker already handles the signal for stacks, which would kill it earlier."""
        return progress.parse(_content(self.progress)) is not None

    @property
    def saves_checkpoint(self) -> bool:
        """Whether the worker answers SIGTERM by saving a checkpoint."""
        return progress.parse_saves_checkpoint(_content(self.progress))

    @property
    def result(self) -> bytes:
        return b"" if self.call is None else _content(self.call[1])

    @property
    def finished(self) -> bool:
        """Whether the program ended without error; for exits with an unknown code."""
        return _content(self.error) == bootstrap.NO_ERROR

    def new_report(self, rank: int) -> WorkerReport | None:
        """The worker's report, if it is new since the last call."""
        content = _content(self.progress)  # a single read, so that phase and figures are consistent
        last, encoded = progress.parse(content), progress.parse_figures(content)
        number, when = self._reported
        figures = None
        if encoded is not None and encoded[0] != number:
            with contextlib.suppress(FrameError):  # a mixture, see `parse_figures`; wait for the next
                number, figures = encoded[0], decode_message(encoded[1], WorkerFigures)
        if last is None or (figures is None and last.time == when):
            return None
        self._reported = number, last.time
        saves, age_s = progress.parse_saves_checkpoint(content), max(0.0, time.time() - last.time)
        return WorkerReport(rank, TaskReport(last.phase, last.epoch, last.step, age_s, saves, figures))

    def request_checkpoint(self) -> None:
        """Ask the worker for a checkpoint."""
        progress.request_save(self.progress.fileno())

    def diagnostics(self, state: str, *, code_is_unknown: bool) -> WorkerDiagnostics:
        """Collect the evidence of how the worker ended.

        Args:
            state: See `WorkerDiagnostics`.
            code_is_unknown: Whether the exit code is lost, because the kernel or this program reaped the process.
        """
        stacks = bootstrap.without_own_frames(_content(self.stacks).decode(errors="replace"))
        error = crash_report.parse(_content(self.error))
        if code_is_unknown and error is None and not self.finished:
            error = _LOST_EXIT_CODE
        found = WorkerDiagnostics(state=state, stacks=stacks[:MAX_STACK_CHARACTERS], error=error)
        last = progress.parse(_content(self.progress))
        if last is None:
            return found
        age_s = max(0.0, time.time() - last.time)
        return replace(found, phase=last.phase, epoch=last.epoch, step=last.step, age_s=age_s)

    def close(self) -> None:
        """Close all files. Safe to call twice."""
        for file in (self.progress, self.stacks, self.error, *(self.call or ())):
            file.close()


def _content(file: BinaryIO) -> bytes:
    # pread, since the worker shares the file's position.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
