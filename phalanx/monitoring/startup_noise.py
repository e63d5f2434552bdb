"""Leaves out the lines that TensorFlow writes while it is imported, before any setting of the user reaches it.

TF_CPP_MIN_LOG_LEVEL turns off its other lines of this kind; these come from native code before that is read. Text in,
text out: what may become such a line is held back until it is one, or is not.
"""

from __future__ import annotations

import re

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
"""Variables of a worker whose native code writes errors only, as that of every worker does by default."""
LOUD = {"TF_CPP_MIN_LOG_LEVEL": "0"}
# The header, and what absl writes at the level of information until it is initialized.
_BEGINNINGS = (
    "WARNING: All log messages before absl::InitializeLog() is called",
    "I0000 00:00:",
    "[Gloo] Rank ",  # its collectives are connected, once for each device
)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


class StartupNoiseFilter:
    """Filters one stream."""

    def __init__(self) -> None:
        self._held = ""  # the beginning of a line that may still become noise
        self._begins_line = True  # what follows begins a line

    def feed(self, text: str) -> str:
        """The text without lines of noise, less what is held back."""
        text, self._held = self._held + text, ""
        shown = []
        for line in _LINE.findall(text):
            if not self._begins_line or not _may_be_noise(line):
                shown.append(line)
                self._begins_line = line.endswith("\n")
            elif not line.endswith("\n"):
                self._held = line
        return "".join(shown)

    def finish(self) -> str:
        """The output that was held back."""
        held, self._held = self._held, ""
        return "" if held.startswith(_BEGINNINGS) else held


def _may_be_noise(line: str) -> bool:
    return any(line.startswith(beginning) or beginning.startswith(line) for beginning in _BEGINNINGS)
