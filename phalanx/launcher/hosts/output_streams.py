"""Connects the workers of this host to the launcher's stdin, stdout and stderr."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import termios
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TerminalSize:
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class OutputStreams:
    """Settings of the workers' streams.

    Attributes:
        merged: Whether stdout and stderr are one stream, which keeps their order.
        terminal: Size of rank 0's terminal, if the launcher writes to a terminal; None for pipes.
        inherit_input: Whether rank 0 reads the launcher's stdin. The others read nothing.
    """

    merged: bool = False
    terminal: TerminalSize | None = None
    inherit_input: bool = False

    def open(self, rank: int) -> WorkerStreams:
        """Open new streams for one worker."""
        stdin = None if self.inherit_input and rank == 0 else subprocess.DEVNULL
        if rank == 0 and self.terminal is not None:
            reader, stdout = _open_terminal(self.terminal)
        else:
            reader, stdout = os.pipe()
        os.set_blocking(reader, False)
        if self.merged:
            return WorkerStreams(stdin, stdout, stdout, {reader: False})
        error_reader, stderr = os.pipe()
        os.set_blocking(error_reader, False)
        return WorkerStreams(stdin, stdout, stderr, {reader: False, error_reader: True})


class WorkerStreams(NamedTuple):
    """Descriptors of one worker's streams.

    Attributes:
        stdin, stdout, stderr: The worker's ends, as for `subprocess.Popen`.
        readers: The launcher's ends; the values are whether they are stderr.
    """

    stdin: int | None
    stdout: int
    stderr: int
    readers: dict[int, bool]


def _open_terminal(size: TerminalSize) -> tuple[int, int]:
    ours, theirs = os.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST  # the real terminal processes the output, once
    mode[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    set_terminal_size(theirs, size)
    return ours, theirs


def set_terminal_size(fd: int, size: TerminalSize) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))
