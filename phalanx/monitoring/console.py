"""Merges the output of all tasks on one terminal.

Every line begins with the name of the task that wrote it. Complete lines are easy. Everything else is a progress bar:
text that is redrawn after a carriage return. On a terminal, the chief's bar is drawn live, as without Phalanx, and the
lines of other tasks appear above it: erase the bar, write the line, redraw the bar. Without a terminal, each line is
shown when it is complete, in its final state on a terminal.

`LineAssembler` and `LiveLine` are text in, text out; `Console` owns the streams. Not `rich.live`, which draws
renderables of its own process. Here another process draws with arbitrary escape sequences, which must be passed through
unchanged.
"""

from __future__ import annotations

import codecs
import functools
import io
import os
import re
import select
import sys
import unicodedata
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol

from phalanx.monitoring.startup_noise import StartupNoiseFilter

# A control sequence (ECMA-48, ECMA-35): CSI ... final byte, or OSC ... terminator, or an escape of at least two
# characters, such as `tput sgr0` (ESC ( B) and `tput sc` (ESC 7).
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\-~])")
_COLOR_ESCAPE = re.compile(r"\x1b\[[0-9;:]*m")
_INCOMPLETE_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*|[ -/]+)?$")
_TOKEN = re.compile(rf"{_ESCAPE.pattern}|[\r\n\b]|[^\x1b\r\n\b]+|\x1b")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_ERASE = "\r\x1b[2K"
_RESET = "\x1b[0m"
_SHOW_CURSOR = "\x1b[?25h"
# Distinct on dark and light backgrounds.
_COLORS = ("36", "33", "35", "32", "34", "31")
# A line that never ends must not fill the memory, so it is shown in pieces of this length.
MAX_LINE_CHARACTERS = 100_000
# The longest sequences in use set a window's title.
MAX_ESCAPE_CHARACTERS = 1000
NOTEBOOK = -1
"""Replaces the width of a terminal; lines do not wrap."""


class TextSink(Protocol):
    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def prefixes(tasks: Sequence[str], *, color: bool) -> list[str]:
    """The prefix of each task's lines."""
    if not color:
        return [f"[{task}] " for task in tasks]
    return [f"\x1b[{_COLORS[i % len(_COLORS)]}m[{task}]{_RESET} " for i, task in enumerate(tasks)]


def without_escapes(text: str) -> str:
    return _ESCAPE.sub("", text)


def width(text: str) -> int:
    """Number of columns of a text without line breaks.

    Source: Unicode Standard Annex 11; East Asian characters and emoji take two columns, combining characters none.
    """
    shown = without_escapes(text)
    if shown.isascii():
        return len(shown)
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else not unicodedata.combining(each) for each in shown)


def plain_text(content: bytes) -> str:
    """A task's output in its final state on a terminal, without colors."""
    lines = content.decode(errors="replace").replace("\r\n", "\n").split("\n")
    return "\n".join(_without_controls(_final(line)) for line in lines)


def _without_controls(line: str) -> str:
    return _CONTROLS.sub("", without_escapes(line))


class LineAssembler:
    """Assembles pieces of text into complete lines, each in its final state on a terminal."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        *lines, self._rest = (self._rest + text).split("\n")
        # An endless line is shown in pieces. Of an endless bar, only the visible text is kept, because its history
        # grows with each redraw.
        if len(self._rest) > MAX_LINE_CHARACTERS and "\r" not in self._rest:
            lines.append(self._rest)
            self._rest = ""
        elif len(self._rest) > MAX_LINE_CHARACTERS:
            shown = _final(self._rest)
            self._rest = "\r" + shown
            if len(shown) > MAX_LINE_CHARACTERS // 2:
                lines.append(shown)
                self._rest = ""
        return [_final(line) for line in lines]

    def finish(self) -> list[str]:
        """Return the last line if it is incomplete."""
        rest, self._rest = _final(self._rest), ""
        return [rest] if rest else []


def _final(line: str) -> str:
    """The visible text of a line, in which carriage returns move back to its start."""
    drawn = [part.rstrip("\b") for part in line.split("\r")]
    return next((part for part in reversed(drawn) if without_escapes(part)), "")


class PlainLog:
    """Log file of one task: complete lines in their final state on a terminal, without control characters.

    Raises (each method): OSError if the file cannot be written.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._lines = {False: LineAssembler(), True: LineAssembler()}  # by whether it is stderr

    def feed(self, is_error: bool, text: str) -> None:
        self._write(self._lines[is_error].feed(text.replace("\r\n", "\n")))

    def finish(self) -> None:
        """Log the last lines if they are incomplete."""
        for assembler in self._lines.values():
            self._write(assembler.finish())

    def _write(self, lines: Sequence[str]) -> None:
        if lines:
            self._file.write("".join(f"{_without_controls(line)}\n" for line in lines).encode(errors="replace"))


class LiveLine:
    """The terminal's last line, drawn by the chief. Converts the chief's output to the input of the terminal.

    Args:
        prefix: Text that precedes the line.
        is_notebook: Whether the "terminal" is a notebook cell, which supports only two kinds of control sequences:
            carriage returns and colors.
        color: Whether to keep the chief's own colors.
    """

    def __init__(self, prefix: str, *, is_notebook: bool = False, color: bool = True):
        self._prefix = prefix
        self._color = color
        self._is_notebook = is_notebook
        self._shown: list[str] = []  # what the last line shows, without the prefix
        self._shown_characters = 0
        self._at_start = True  # the cursor is in the first column, without a prefix
        self.escaped = False  # whether the chief has used any escape sequence
        self._escape = ""  # the beginning of an incomplete escape sequence

    def feed(self, text: str) -> str:
        text = self._escape + text
        # Anything longer is not an escape sequence and is passed through.
        incomplete = _INCOMPLETE_ESCAPE.search(text, max(0, len(text) - MAX_ESCAPE_CHARACTERS))
        self._escape = incomplete.group() if incomplete else ""
        text = text[: len(text) - len(self._escape)]
        written = []
        self.escaped = self.escaped or "\x1b" in text
        for token in _TOKEN.findall(text):
            if not self._color and _COLOR_ESCAPE.fullmatch(token):
                continue
            if token == "\n":
                if self._at_start and not self._shown:
                    written.append(self._prefix)  # empty lines have a prefix too
                self._begin()
                self._at_start = True
            elif token == "\r":
                self._at_start = True
            elif token == "\b" and (self._at_start or self._is_notebook):
                continue  # it would move into the prefix; in notebooks, it would delete parts of color sequences
            elif token.startswith("\x1b[") and token[-1] in "JK":
                self._begin()
            elif _ESCAPE.fullmatch(token) and not token.endswith("m"):
                pass  # moves the cursor; the prefix waits for visible text
            elif self._at_start:
                written.append(self._prefix)
                self._begin(token)
                self._at_start = False
            elif token != "\b":
                self._shown.append(token)
                self._shown_characters += len(token)
            written.append(token)
            if self._shown_characters > MAX_LINE_CHARACTERS:  # it continues on a new line
                written.append("\n")
                self._begin()
                self._at_start = True
        return "".join(written)

    def _begin(self, *shown: str) -> None:
        """Replace the visible text of the line."""
        self._shown = list(shown)
        self._shown_characters = sum(map(len, shown))

    @property
    def is_open(self) -> bool:
        """Whether the cursor is on a line with text."""
        return bool(self._shown) or not self._at_start

    def above(self, lines: str, columns: int) -> str:
        """Return the text that inserts `lines` (ending in a line break) above the live line."""
        if not self.is_open:
            return lines
        shown = self._prefix + "".join(self._shown)
        if self._is_notebook:  # only spaces erase what is longer than the new line
            return f"\r{' ' * width(shown)}\r{_RESET}{lines}{shown}" + ("\r" if self._at_start else "")
        # A bar that is longer than a row has wrapped: go up to its first row.
        up = (width(shown) - 1) // columns if columns > 0 else 0
        erase = f"\r\x1b[{up}A\x1b[J" if up else _ERASE
        # A bar that ends with a carriage return expects the cursor at the start of the line.
        return f"{erase}{_RESET}{lines}{shown}" + ("\r" if self._at_start else "")


class Console:
    """Shows the output of all tasks and logs it to one file per task.

    Args:
        tasks: Names of the tasks in rank order; rank 0 is the chief.
        out, err: Destinations of the tasks' stdout and stderr; the same object if both go to the same place.
        columns: Width of the terminal; None if `out` is not a terminal, NOTEBOOK if it is a notebook cell.
        color: Whether to color prefixes and keep the tasks' own colors.
        logs: One file per task for all of its output; empty to log nothing.
        quiet: Whether to hide TensorFlow's start-up lines. They are still logged.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        out: TextSink,
        err: TextSink,
        *,
        columns: int | None = None,
        color: bool = False,
        logs: Sequence[BinaryIO] = (),
        quiet: bool = False,
    ):
        self.columns = columns
        self._out, self._err = out, err
        self._prefixes = prefixes(tasks, color=color)
        self._color = color
        self._logs = [PlainLog(file) for file in logs]
        self._live = LiveLine(self._prefixes[0], is_notebook=columns == NOTEBOOK, color=color)
        self._ended: list[TextSink] = []  # outputs that can no longer be written, such as a file on a full disk
        # Keys: rank, whether it is stderr. A piece of output may end within a character, a line or an escape sequence.
        self._decoders: dict[tuple[int, bool], codecs.IncrementalDecoder] = {}
        self._lines: dict[tuple[int, bool], LineAssembler] = {}
        self._filters: dict[tuple[int, bool], StartupNoiseFilter] | None = {} if quiet else None

    @property
    def is_merged(self) -> bool:
        """Whether the tasks' stdout and stderr go to the same place."""
        return self._out is self._err

    def feed(self, rank: int, is_error: bool, data: bytes) -> None:
        """Show the complete lines of what a task has written."""
        source = (rank, is_error)
        if source not in self._decoders:
            self._decoders[source] = codecs.getincrementaldecoder("utf-8")(errors="replace")
            self._lines[source] = LineAssembler()
        text = self._decoders[source].decode(data)
        self._logged(lambda log: log.feed(is_error, text), rank)
        if self._filters is not None:
            text = self._filters.setdefault(source, StartupNoiseFilter()).feed(text)
        self._show(rank, is_error, text)

    def _show(self, rank: int, is_error: bool, text: str) -> None:
        # The chief's stderr is shown in complete lines: drawn live, it would share the last line with its stdout.
        if rank == 0 and self.columns is not None and not is_error:
            self._write(False, self._live.feed(text))
        else:
            self._write_lines(rank, is_error, self._lines[rank, is_error].feed(text.replace("\r\n", "\n")))

    def log(self, rank: int, text: str) -> None:
        """Add text to the log of a task without showing it."""
        self._logged(lambda log: log.feed(True, text), rank)
        self._logged(PlainLog.finish, rank)

    def _logged(self, write: Callable[[PlainLog], None], rank: int) -> None:
        if self._logs:
            try:
                write(self._logs[rank])
            except OSError as error:
                self._logs = []
                self.message(f"phalanx: the log files end here ({error.strerror}); the job continues")

    def finish(self, rank: int) -> None:
        """Show the rest of an exited task's last line; later output begins on a new line."""
        for is_error in (False, True):
            if (rank, is_error) in self._decoders:  # the decoder may hold an incomplete character
                held = self._filters.pop((rank, is_error), StartupNoiseFilter()).finish() if self._filters else ""
                rest = self._decoders[rank, is_error].decode(b"", final=True)
                self._logged(functools.partial(PlainLog.feed, is_error=is_error, text=rest), rank)
                self._show(rank, is_error, held + rest)
        self._logged(PlainLog.finish, rank)
        if rank == 0 and self.columns is not None and self._live.is_open:
            self._write(False, self._live.feed("\n"))
        for is_error in (False, True):
            lines = self._lines.get((rank, is_error))
            if lines is not None:
                self._write_lines(rank, is_error, lines.finish())

    def message(self, text: str) -> None:
        """Show lines of the launcher on stderr."""
        self._put_above(True, text if text.endswith("\n") else f"{text}\n")

    def close(self) -> None:
        """Restore the terminal: cursor visible and at the start of a line, no color."""
        if self.columns is not None:
            self._write(False, self._live.feed("\n") if self._live.is_open else "")
            # An interrupted progress bar may have left the cursor hidden.
            if self._live.escaped and self.columns != NOTEBOOK:
                self._write(False, f"{_RESET}{_SHOW_CURSOR}")

    def _write_lines(self, rank: int, is_error: bool, lines: Sequence[str]) -> None:
        shown = lines if self._color else [without_escapes(line) for line in lines]
        if shown:
            self._put_above(is_error, "".join(f"{self._prefixes[rank]}{line}\n" for line in shown))

    def _put_above(self, is_error: bool, lines: str) -> None:
        if self.columns is not None:
            # If both streams are the terminal, they share the cursor. Otherwise, these are independent writes.
            lines = self._live.above(lines, self.columns) if self._err is self._out or not is_error else lines
        self._write(is_error, lines)

    def _write(self, is_error: bool, text: str) -> None:
        sink: TextSink | None = self._err if is_error else self._out
        if getattr(sink, "closed", False):  # the stream of a test runner, which has replaced the original
            sink = sys.__stderr__ if is_error else sys.__stdout__
        if sink is None or sink in self._ended or not text:
            return
        try:
            write_whole(sink, text)
        except BrokenPipeError:  # the reader has exited, so the job is no longer wanted
            raise
        except OSError as error:
            self._ended.append(sink)
            _discard(sink)
            self.message(f"phalanx: the output ends here ({error.strerror}); the job continues")


def write_whole(sink: TextSink, text: str) -> None:
    """Write a text completely. If the sink is full, wait, even while a user pauses it: another process that shares the
    pipe or terminal can make it non-blocking, as OpenSSH does. Characters that the sink's encoding lacks become
    question marks."""
    encoding = getattr(sink, "encoding", None) or "utf-8"
    errors = getattr(sink, "errors", None) or "strict"
    data = text.encode(encoding, "replace" if errors == "strict" else errors)
    descriptor = _descriptor(sink)
    if descriptor is None:
        sink.write(data.decode(encoding, errors))
        sink.flush()
        return
    while data:
        try:
            sink.flush()  # text of other writers; `write` would lose what is not accepted at once
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(descriptor, select.POLLOUT)
            writable.poll()


def _descriptor(sink: TextSink) -> int | None:
    """The file descriptor of a plain stream; None for a replacement (by a notebook or a test runner), which writes by
    itself."""
    if type(sink) is not io.TextIOWrapper:
        return None
    try:
        return sink.fileno()
    except OSError:  # it writes to memory
        return None


def _discard(sink: TextSink) -> None:
    """Discard buffered text that the sink would write at exit."""
    if isinstance(sink, io.TextIOWrapper):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sink.fileno())
        os.close(nowhere)
