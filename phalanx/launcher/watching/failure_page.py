"""The failure report as those who watch a job read it: it names no file that is not there."""

from __future__ import annotations

from pathlib import Path

from phalanx.launcher.log_directory import JSON_FILE, PAGE_FILE

_AS_FILES = f", and this report as {PAGE_FILE} and {JSON_FILE}"


def without_missing_files(page: str, log_dir: Path | None) -> str:
    """The page; where the log directory does not have it as files, it does not say so."""
    if log_dir is not None and all((log_dir / name).is_file() for name in (PAGE_FILE, JSON_FILE)):
        return page
    return page.replace(_AS_FILES, "")
