"""A file that says that a job is over, for an evaluator that cannot ask the job itself."""

from __future__ import annotations

import logging

from phalanx.runtime.write_claim import WriteClaim
from phalanx.storage.files import write_file
from phalanx.storage.paths import StoragePath

logger = logging.getLogger(__name__)

NAME = "finished"


def announce_beginning(directory: StoragePath, claim: WriteClaim) -> None:
    """The chief has begun: what a former job said does not count.

    Args:
        claim: the chief's, to its checkpoints in the directory: a process that another one has succeeded announces
            nothing for it.
    """
    marker = directory / NAME
    if marker.exists():
        with claim.writing():
            marker.unlink(missing_ok=True)


def announce_end(directory: StoragePath, claim: WriteClaim) -> None:
    """The chief has saved for the last time. Raises: SupersededError."""
    try:
        if directory.is_dir():
            with claim.writing():
                write_file(directory / NAME, b"")
    except OSError as error:  # what was trained is saved: that no evaluator learns of the end must not fail the program
        logger.warning("%s cannot be written (%s); an evaluator may wait for another checkpoint.", NAME, error)


def is_announced(directory: StoragePath) -> bool | None:
    """Whether the job that saved last in a directory has ended without an error; None if that cannot be known now."""
    try:
        return (directory / NAME).exists()
    except OSError as error:  # a store that does not answer: asked again soon
        logger.debug("%s cannot be read: %s", directory, error)
        return None
