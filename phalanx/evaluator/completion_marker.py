"""A file that says that a job is over, for an evaluator that cannot ask the job itself."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.checkpoint.checkpoint_directory import sync_directory

NAME = "finished"


def announce_beginning(directory: Path) -> None:
    """The chief has begun: what a former job said does not count."""
    (directory / NAME).unlink(missing_ok=True)


def announce_end(directory: Path) -> None:
    """The chief has saved for the last time."""
    if directory.is_dir():
        descriptor = os.open(directory / NAME, os.O_WRONLY | os.O_CREAT, 0o666)
        os.close(descriptor)
        sync_directory(directory)


def is_announced(directory: Path) -> bool:
    """Whether the job that saved last in a directory has ended without an error."""
    return (directory / NAME).exists()
