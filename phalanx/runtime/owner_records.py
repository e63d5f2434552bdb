"""Records of a directory's owner for `write_claim`: locked files, or an object in a store."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

from phalanx.storage.file_locks import lock, unlock
from phalanx.storage.files import write_file
from phalanx.storage.paths import StoragePath
from phalanx.storage.remote_path import RemotePath

LOCK_S = 120.0
"""Seconds that another process may take to move a file into place."""
POLL_S = 0.05


def owner_record(directory: StoragePath, name: str) -> OwnerFile | OwnerObject:
    """The record `.NAME.owner` of a directory."""
    if isinstance(directory, RemotePath):
        return OwnerObject(directory / f".{name}.owner")
    return OwnerFile(directory / f".{name}.owner", directory / f".{name}.lock")


class OwnerFile:
    """A record in a file system. The owner file is locked while the owner lives, the lock file while the owner changes.

    Attributes:
        path: The record, which `claim` writes.
    """

    def __init__(self, path: Path, lock_path: Path) -> None:
        self.path = path
        self._lock_path = lock_path
        self._alive: BinaryIO | None = None  # the owner's file, locked
        self._taken_by = 0  # the process that locked it; forks inherit the other attributes

    @property
    def is_owned(self) -> bool:
        """Whether this object has taken the record and not dropped it since."""
        return self._alive is not None and self._taken_by == os.getpid()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Prevent other processes from changing the owner. Raises OSError if one holds the lock for too long."""
        deadline = time.monotonic() + LOCK_S
        while True:
            with open(self._lock_path, "ab") as file:
                if lock(file.fileno()):
                    try:
                        is_current = os.path.samestat(os.fstat(file.fileno()), os.stat(self._lock_path))
                    except FileNotFoundError:
                        is_current = False
                    if is_current:  # otherwise the directory was emptied in the meantime
                        try:
                            yield
                        finally:
                            unlock(file.fileno())
                        return
            if time.monotonic() > deadline:
                reason = "Another process has locked it, and may be stopped"
                raise OSError(errno.ETIMEDOUT, reason, str(self._lock_path))
            time.sleep(POLL_S)

    def is_alive(self) -> bool:
        """Whether the owner is known to be alive."""
        with open(self.path, "ab") as file:
            return not lock(file.fileno())

    def claim(self, content: bytes) -> None:
        """Write the record, and count as alive until `release`."""
        for left in self.path.parent.glob(f"{glob.escape(self.path.name)}.*"):  # left by a killed process
            left.unlink(missing_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        file = open(temporary, "wb")  # noqa: SIM115  # stays open, and so locked, until `release`
        try:
            lock(file.fileno())  # before the rename, so that the owner file is never unlocked
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        self._alive, self._taken_by = file, os.getpid()

    def release(self) -> None:
        """Stop counting as alive. Safe to call twice."""
        if self._alive is not None:
            if self.is_owned:  # a fork would unlock it for its parent
                unlock(self._alive.fileno())
            self._alive.close()
            self._alive = None


class OwnerObject:
    """A record in a store, which has no locks: the last process to take it owns it. See `OwnerFile`."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.is_owned = False

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def is_alive(self) -> bool:
        return False

    def claim(self, content: bytes) -> None:
        write_file(self.path, content)
        self.is_owned = True

    def release(self) -> None:
        self.is_owned = False
