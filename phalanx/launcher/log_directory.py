"""The log directory of a job (`--log-dir`): the output of each task, all events, and a report if the job fails."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from phalanx.errors import ConfigurationError
from phalanx.monitoring.job_events import EVENTS_FILE
from phalanx.storage.file_locks import lock, unlock

PAGE_FILE = "failure.txt"
JSON_FILE = "failure.json"
_TASK_LOG = re.compile(r"(chief|worker|ps|evaluator)-\d+\.log")


class JobLogs(NamedTuple):
    """The open files of a job's logs.

    Attributes:
        outputs: One file for each task; empty without a log directory.
        events: File of events, for `phalanx report`; None without a log directory.
    """

    outputs: Sequence[BinaryIO]
    events: BinaryIO | None


def log_name(task: str) -> str:
    """Name of the file in the log directory with the output of a task."""
    return f"{task.replace('/', '-')}.log"


@contextlib.contextmanager
def open_logs(folder: Path | None, tasks: Sequence[str]) -> Iterator[JobLogs]:
    """Create the directory if needed, lock it for this job, and remove the files of an earlier job.

    Raises: ConfigurationError if it is not writable, or if another running job writes there.
    """
    if folder is None:
        yield JobLogs([], None)
        return
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Locked before anything is removed: until then, it may belong to another job.
            events = stack.enter_context(open(folder / EVENTS_FILE, "ab", 0, opener=open_no_link))
            if not lock(events.fileno()):
                raise ConfigurationError(
                    f"Another job writes its logs to {folder} (`phalanx status` lists the jobs that run). "
                    "Name another directory."
                )
            stack.callback(unlock, events.fileno())
            events.truncate(0)
            names = [log_name(task) for task in tasks]
            logs_before = {path.name for path in folder.iterdir() if _TASK_LOG.fullmatch(path.name)}
            # Files of an earlier job would be mistaken for this job's.
            for old in (PAGE_FILE, JSON_FILE, *(logs_before - set(names))):
                (folder / old).unlink(missing_ok=True)
            outputs = [stack.enter_context(open(folder / name, "wb", 0, opener=open_no_link)) for name in names]
        except OSError as error:
            raise ConfigurationError(
                f"The log directory {folder} cannot be written to: {error.strerror}. "
                "Name a directory that can be created or written to."
            ) from error
        yield JobLogs(outputs, events)


def open_no_link(path: str, flags: int) -> int:
    """Open a file, but no link: other users of the directory could make a link that leads to another file of this user.

    Raises: OSError if the file is a symbolic link.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
