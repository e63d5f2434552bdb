"""Paths that a program gives for what a job keeps: of a local file system, or one that is mounted on all hosts."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.errors import ConfigurationError

_URL = "://"


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether this names something that is not in a file system, such as `gs://bucket/run`."""
    return _URL in os.fspath(path)


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """The path.

    >>> local_path("runs/1", "directory").name
    '1'

    Args:
        argument: its name, for messages.

    Raises: ConfigurationError for a URL, of which `pathlib` would make a local folder called `gs:`.
    """
    if is_url(path):
        scheme = os.fspath(path).partition(_URL)[0]
        raise ConfigurationError(
            f"{argument} is {os.fspath(path)!r}. Phalanx writes checkpoints and logs with locks and atomic renames, "
            f"which {scheme}:// does not have, so it needs a path in a file system. Mount the bucket (gcsfuse, "
            f"mountpoint-s3, s3fs) and pass the folder, or write locally and copy what is finished."
        )
    return Path(path)
