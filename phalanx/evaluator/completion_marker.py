"""A file that marks a job as finished, for an evaluator that cannot probe the job."""

from __future__ import annotations

import logging

from phalanx.runtime.write_claim import WriteClaim
from phalanx.storage.files import write_file
from phalanx.storage.paths import StoragePath

logger = logging.getLogger(__name__)

NAME = "finished"


def remove_marker(directory: StoragePath, claim: WriteClaim) -> None:
    """Remove the marker of a former job when the chief starts.

    Args:
        claim: The chief's claim to its checkpoints in the directory: a superseded process must not change the marker of
            its successor.
    """
    marker = directory / NAME
    if marker.exists():
        with claim.writing():
            marker.unlink(missing_ok=True)


def write_marker(directory: StoragePath, claim: WriteClaim) -> None:
    """Write the marker after the chief's last save. Raises: SupersededError."""
    try:
        if directory.is_dir():
            with claim.writing():
                write_file(directory / NAME, b"")
    except OSError as error:  # the training is saved: a missing marker must not fail the program
        logger.warning("%s cannot be written (%s); an evaluator may wait for another checkpoint.", NAME, error)


def has_marker(directory: StoragePath) -> bool | None:
    """Return whether the job that last saved in a directory has ended without an error; None if currently unknown."""
    try:
        return (directory / NAME).exists()
    except OSError as error:  # an object store that does not answer: the caller asks again soon
        logger.debug("%s cannot be read: %s", directory, error)
        return None
