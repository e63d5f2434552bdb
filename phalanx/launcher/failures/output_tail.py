"""The last lines that each task wrote, for the failure report of a task that left no traceback."""

from __future__ import annotations

from phalanx.monitoring.console import LineAssembler, without_escapes

TAIL_BYTES = 4096
TAIL_LINES = 8


class OutputTails:
    """Keeps the end of what each task writes to its standard error, or to both outputs where they are one.

    Args:
        merged: whether stdout and stderr of the tasks are one stream.
    """

    def __init__(self, *, merged: bool):
        self._merged = merged
        self._tails: dict[tuple[int, bool], bytes] = {}  # by rank and whether it is stderr

    def append(self, rank: int, is_error: bool, data: bytes) -> None:
        if is_error or self._merged:
            self._tails[rank, is_error] = (self._tails.get((rank, is_error), b"") + data)[-TAIL_BYTES:]

    def clear(self, rank: int) -> None:
        """A new process of this task has started."""
        for is_error in (False, True):
            self._tails.pop((rank, is_error), None)

    def last_lines(self, rank: int) -> str:
        """As a terminal shows them in the end: a progress bar is one line."""
        tail = self._tails.get((rank, True)) or self._tails.get((rank, False), b"")
        assembler = LineAssembler()
        text = tail.decode(errors="replace").replace("\r\n", "\n")
        lines = [without_escapes(line) for line in [*assembler.feed(text), *assembler.finish()]]
        return "\n".join(line for line in lines[-TAIL_LINES:] if line.strip())
