"""The paths that a program passes for files of a job: in a file system, or URLs of a store."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.errors import ConfigurationError
from phalanx.storage.remote_path import SEPARATOR, RemotePath, check_store

PathArgument = str | os.PathLike[str] | RemotePath
"""A path as programs pass it."""
StoragePath = Path | RemotePath
"""A resolved path. Both classes have the methods that Phalanx uses; `storage.files` has all other operations."""


def is_url(path: PathArgument) -> bool:
    """Whether the path is outside the file system, such as `gs://bucket/run`."""
    return isinstance(path, RemotePath) or SEPARATOR in os.fspath(path)


def storage_path(path: PathArgument, argument: str) -> StoragePath:
    """Convert an argument to a path.

    >>> storage_path("runs/1", "directory").name
    '1'

    Args:
        argument: Name of the argument, for messages.

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
    """Like `storage_path`, for paths that must be in a file system.

    Raises: ConfigurationError for a URL, which `pathlib` would turn into a local folder named `gs:`.
    """
    if is_url(path):
        raise ConfigurationError(
            f"{argument} is {os.fspath(path)!r}, and must be a folder in a file system. Mount the bucket (gcsfuse, "
            f"mountpoint-s3) and pass the folder, or write locally and copy what is finished."
        )
    return Path(path)
