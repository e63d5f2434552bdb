"""Writes a report: the page of an ended job as a single file that needs no server and no network."""

from __future__ import annotations

from pathlib import Path

from phalanx.dashboard import browser_view, page
from phalanx.errors import ConfigurationError
from phalanx.launcher.failures.failure_report import without_missing_files
from phalanx.launcher.log_directory import log_name
from phalanx.launcher.watching.job_follower import read_view
from phalanx.monitoring.console import plain_text
from phalanx.monitoring.job_events import EVENTS_FILE
from phalanx.storage.files import read_end, write_file

REPORT_FILE = "report.html"
OUTPUT_BYTES = 64 * 1024
"""How much of the end of each task's output is included."""


def write(log_dir: Path, path: Path | None = None) -> Path:
    """Write the report of a job, and return its path.

    Args:
        log_dir: Log directory of the job.
        path: File to write; None for `report.html` in the log directory.

    Raises: ConfigurationError if the directory does not belong to a job, or the file cannot be written.
    """
    path = path or log_dir / REPORT_FILE
    if not path.name:
        raise ConfigurationError(f"{str(path)!r} is not the name of a file for the report.")
    document = render(log_dir)
    try:
        write_file(path, document.encode())
    except OSError as error:
        raise ConfigurationError(f"The report cannot be written to {path}: {error.strerror}.") from error
    return path


def render(log_dir: Path) -> str:
    """Render the report of a job as an HTML document. Raises: see `write`."""
    view = read_view(log_dir)
    if view.started is None:
        raise ConfigurationError(f"{log_dir / EVENTS_FILE} does not say which job ran: it is empty or damaged.")
    data = browser_view.message(view, live=False)
    for name in ("page", "folded"):
        data["head"][name] = without_missing_files(data["head"][name], log_dir)
    data["outputs"] = {task: _end_of(log_dir / log_name(task)) for task in view.members}
    return page.render(data)


def _end_of(path: Path) -> str:
    try:
        return plain_text(read_end(path, OUTPUT_BYTES))
    except OSError:  # the task has written nothing, or the file was deleted
        return ""
