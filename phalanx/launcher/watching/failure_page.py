"""The failure report as those who watch a job read it: with folded tracebacks, and naming no file that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from phalanx.launcher.log_directory import JSON_FILE, PAGE_FILE
from phalanx.runtime.crash_report import CrashReport

_AS_FILES = f", and this report as {PAGE_FILE} and {JSON_FILE}"


def fold(page: str, errors: Iterable[CrashReport]) -> str:
    """The page with the frames of libraries counted, as on a terminal.

    Args:
        page: with whole tracebacks.
        errors: whose tracebacks these are.
    """
    for error in errors:
        if error.traceback and error.folded:
            page = page.replace(error.traceback.rstrip("\n"), error.folded.rstrip("\n"))
    return page


def without_missing_files(page: str, log_dir: Path | None) -> str:
    """The page; where the log directory does not have it as files, it does not say so."""
    if log_dir is not None and all((log_dir / name).is_file() for name in (PAGE_FILE, JSON_FILE)):
        return page
    return page.replace(_AS_FILES, "")
