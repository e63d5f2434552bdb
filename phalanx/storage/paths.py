"""The paths that a program gives for what a job keeps: of a file system, or URLs of a store."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.errors import ConfigurationError
from phalanx.storage.remote_path import SEPARATOR, RemotePath, check_store

PathArgument = str | os.PathLike[str] | RemotePath
"""What programs pass."""
StoragePath = Path | RemotePath
"""The two have the same methods, as far as Phalanx uses them; `storage.files` has what they do not."""


def is_url(path: PathArgument) -> bool:
    """Whether this names something that is not in a file system, such as `gs://bucket/run`."""
    return isinstance(path, RemotePath) or SEPARATOR in os.fspath(path)


def storage_path(path: PathArgument, argument: str) -> StoragePath:
    """The path.

    >>> storage_path("runs/1", "directory").name
    '1'

    Args:
        argument: Its name, for messages.

    Raises: ConfigurationError for the URL of a store whose package is not installed.
    """
    if isinstance(path, RemotePath):
        return path
    if not is_url(path):
        return Path(path)
    url = os.fspath(path)
    check_store(url, argument)
    return RemotePath(url)


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """As `storage_path`, for what must be in a file system.

    Raises: ConfigurationError for a URL, of which `pathlib` would make a local folder called `gs:`.
    """
    if is_url(path):
        raise ConfigurationError(
            f"{argument} is {os.fspath(path)!r}, and must be a folder in a file system. Mount the bucket (gcsfuse, "
            f"mountpoint-s3) and pass the folder, or write locally and copy what is finished."
        )
    return Path(path)
