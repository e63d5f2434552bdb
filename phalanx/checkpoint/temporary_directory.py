"""A folder for copies that does not stay behind: where a process was killed, the next one removes it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "phalanx-evaluator-"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of this process alone, locked while it is in use: the lock ends with the process, however it dies."""
    _remove_abandoned()
    while True:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
            descriptor = os.open(name, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not os.path.exists(name):
                    continue  # another process took it for abandoned before it was locked
                yield Path(name)
                return
            finally:
                os.close(descriptor)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # somebody else's, or gone
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(descriptor)
