"""Reading, writing and listing files, in a file system or in an object store.

A file that others read is written in two steps: completely under a temporary name in its folder (`staged_file`), and
then renamed (`commit_file`), which is atomic in the file system or the store. Between the two, a writer checks that it
still holds its claim.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from phalanx.storage.paths import StoragePath
from phalanx.storage.remote_path import Identity, RemotePath, StoredFile
from phalanx.storage.temporary_directory import temporary_directory


@contextlib.contextmanager
def staged_file(path: StoragePath, write: Callable[[BinaryIO], None]) -> Iterator[StoragePath]:
    """Write and flush a file's new content under a temporary name in its folder; removed on exit if still there.

    Args:
        write: Function that writes the content.
    """
    # Processes in two containers may have the same process id. The dot hides the file from readers.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        if isinstance(temporary, RemotePath):
            temporary.write(write)
        else:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def commit_file(staging: StoragePath, path: StoragePath) -> None:
    """Rename staged content to its final name."""
    rename(staging, path)
    sync_directory(path.parent)


def write_file(path: StoragePath, content: bytes) -> None:
    """Write a file atomically: it always has either the old content or all of the new content."""
    with staged_file(path, lambda file: _write(file, content)) as staging:
        commit_file(staging, path)


def copy_file(source: Path, target: StoragePath) -> None:
    """Copy a local file atomically: the target always has either the old content or all of the new content."""
    with (
        open(source, "rb") as content,
        staged_file(target, lambda file: shutil.copyfileobj(content, file, 1 << 20)) as new,
    ):
        commit_file(new, target)


def rename(path: StoragePath, target: StoragePath) -> None:
    """Rename a file within its file system or store, replacing an existing target."""
    if isinstance(path, RemotePath):
        assert isinstance(target, RemotePath)
        path.replace(target)
    else:
        os.replace(path, str(target))


def list_names(directory: StoragePath) -> list[str]:
    """The names of all entries of a directory, in a store only of files; empty if it does not exist."""
    if isinstance(directory, RemotePath):
        return [file.name for file in directory.files()]
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_files(directory: StoragePath) -> list[StoredFile]:
    """List the files of a directory. Raises: FileNotFoundError, except for a store, which may have no folders."""
    if isinstance(directory, RemotePath):
        return directory.files()
    found = []
    for entry in os.scandir(directory):
        try:
            status = entry.stat()
        except FileNotFoundError:  # deleted meanwhile
            continue
        if stat.S_ISREG(status.st_mode):
            found.append(StoredFile(entry.name, identity_of(status), status.st_mtime_ns))
    return found


def copy_if_unchanged(path: StoragePath, identity: Identity, copy: Path) -> bool:
    """Copy a file that others may write to a local file. Return whether it had this identity throughout."""
    if isinstance(path, RemotePath):
        path.download(copy)
        return path.info().identity == identity
    with open(path, "rb") as source, open(copy, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        of_copied = os.fstat(source.fileno())
    # Check the copied file and the one that has the name now: it may have been replaced while it was open.
    return all(identity_of(status) == identity for status in (of_copied, os.stat(path)))


def read_end(path: StoragePath, count: int) -> bytes:
    """The last bytes of a file, at most `count`."""
    if isinstance(path, RemotePath):
        return path.read_end(count)
    with open(path, "rb") as file:
        return read_end_of(file, count)


def read_end_of(file: BinaryIO, count: int) -> bytes:
    """The last bytes of an open file in a file system, at most `count`."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - count))
    return file.read(count)


def modified_ns(path: StoragePath) -> int:
    """The modification time of a file, or of a folder in a file system, for ordering those of one folder."""
    return path.info().modified_ns if isinstance(path, RemotePath) else path.stat().st_mtime_ns


@contextlib.contextmanager
def local_copy(path: StoragePath) -> Iterator[Path]:
    """The file in the file system: the file itself, or a copy that is removed on exit."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with temporary_directory() as folder:
        copy = folder / path.name
        path.download(copy)
        yield copy


def sync_directory(directory: StoragePath) -> None:
    """Flush the names in a directory to disk, so that they survive a power failure. A store needs no flush."""
    if isinstance(directory, RemotePath):
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems do not support it
        if error.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def identity_of(status: os.stat_result) -> Identity:
    """The identity of the content of a file in a file system."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)
