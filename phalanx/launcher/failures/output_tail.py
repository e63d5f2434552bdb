"""The last lines of each task's output, for the failure report of a task without a traceback."""

from __future__ import annotations

from phalanx.monitoring.console import LineAssembler, without_escapes

TAIL_BYTES = 4096
TAIL_LINES = 8


class OutputTails:
    """Keeps the end of each task's standard error, or of both outputs if they are merged.

    Args:
        merged: Whether stdout and stderr of the tasks are one stream.
    """

    def __init__(self, *, merged: bool):
        self._merged = merged
        self._tails: dict[tuple[int, bool], bytes] = {}  # by rank and whether it is stderr

    def append(self, rank: int, is_error: bool, data: bytes) -> None:
        if is_error or self._merged:
            self._tails[rank, is_error] = (self._tails.get((rank, is_error), b"") + data)[-TAIL_BYTES:]

    def clear(self, rank: int) -> None:
        """Discard the output of a task that starts a new process."""
        for is_error in (False, True):
            self._tails.pop((rank, is_error), None)

    def last_lines(self, rank: int) -> str:
        """The last lines, as a terminal finally shows them: a progress bar is one line."""
        tail = self._tails.get((rank, True)) or self._tails.get((rank, False), b"")
        assembler = LineAssembler()
        text = tail.decode(errors="replace").replace("\r\n", "\n")
        lines = [without_escapes(line) for line in [*assembler.feed(text), *assembler.finish()]]
        return "\n".join(line for line in lines[-TAIL_LINES:] if line.strip())
