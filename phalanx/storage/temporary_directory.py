"""Temporary directories that are always removed: if a process is killed, the next process removes its directory."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "phalanx-copies-"


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory for this process alone, locked while in use. The lock ends with the process, even if it is killed."""
    _remove_abandoned()
    while True:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
            descriptor = _lock(name)
            if descriptor is None:
                continue
            try:
                yield Path(name)
                return
            finally:
                os.close(descriptor)


def _lock(name: str) -> int | None:
    """Return a descriptor that keeps the directory locked; None if another process removed it as abandoned first."""
    try:
        descriptor = os.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # a process that removes the directory holds the lock briefly
    if os.path.exists(name):
        return descriptor
    os.close(descriptor)
    return None


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # owned by another user, or removed
            continue
        try:
            # The owner holds the lock while it is alive; the kernel releases it even if the owner is killed.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(descriptor)
