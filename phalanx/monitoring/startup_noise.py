"""Removes the lines that TensorFlow writes during its import, before any setting of the user takes effect.

TF_CPP_MIN_LOG_LEVEL disables other such lines, but native code writes these before reading it. Text in, text out: text
that may become such a line is held back until this is decided.
"""

from __future__ import annotations

import re

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
"""Variables that make native code write only errors. Every worker has them by default."""
LOUD = {"TF_CPP_MIN_LOG_LEVEL": "0"}
# The header, and messages of absl at INFO level before its initialization.
_BEGINNINGS = (
    "WARNING: All log messages before absl::InitializeLog() is called",
    "I0000 00:00:",
    "[Gloo] Rank ",  # collectives are connected, once per device
)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


class StartupNoiseFilter:
    """Filter of one stream."""

    def __init__(self) -> None:
        self._held = ""  # the beginning of a line that may become noise
        self._begins_line = True  # the next text begins a line

    def feed(self, text: str) -> str:
        """Return the text without noise and without what is held back."""
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
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return "" if held.startswith(_BEGINNINGS) else held


def _may_be_noise(line: str) -> bool:
    return any(line.startswith(beginning) or beginning.startswith(line) for beginning in _BEGINNINGS)
