"""A file that says that a job is over, for an evaluator that cannot ask the job itself."""

from __future__ import annotations

import logging

from phalanx.storage.files import write_file
from phalanx.storage.paths import StoragePath

logger = logging.getLogger(__name__)

NAME = "finished"


def announce_beginning(directory: StoragePath) -> None:
    """The chief has begun: what a former job said does not count."""
    (directory / NAME).unlink(missing_ok=True)


def announce_end(directory: StoragePath) -> None:
    """The chief has saved for the last time."""
    if directory.is_dir():
        write_file(directory / NAME, b"")


def is_announced(directory: StoragePath) -> bool:
    """Whether the job that saved last in a directory has ended without an error."""
    try:
        return (directory / NAME).exists()
    except OSError as error:  # a store that does not answer: asked again soon
        logger.debug("%s cannot be read: %s", directory, error)
        return False
