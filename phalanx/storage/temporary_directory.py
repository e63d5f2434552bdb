"""A temporary directory that is not left behind: if its process is killed, the next process removes it."""

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
    """A directory for this process alone. It is locked while in use; the lock ends with the process, however that
    ends."""
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
    """A descriptor that keeps it locked; None if another process has removed it as abandoned, before it was locked."""
    try:
        descriptor = os.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # a process that removes it has it for a moment
    if os.path.exists(name):
        return descriptor
    os.close(descriptor)
    return None


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # of another user, or gone
            continue
        try:
            # The owner holds the lock for as long as it lives; the kernel releases it however the owner ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(descriptor)
