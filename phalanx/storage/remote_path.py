"""A file or folder in an object store: the counterpart of `pathlib.Path`, based on `fsspec`.

Most stores have no folders, and none has locks. They store an object completely or not at all. Errors of a store's
package become `OSError`, so that callers treat an unreachable store like a failing disk.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.errors import ConfigurationError

SEPARATOR = "://"
_SCHEMES_WITH_FOLDERS = frozenset(
    {"arrow_hdfs", "dbfs", "file", "ftp", "hdfs", "local", "sftp", "smb", "ssh", "webhdfs"}
)
"""Schemes of stores in which a file needs a folder. In others, creating a folder may create a bucket."""

Identity = tuple[object, int, object]
"""Identifies the content of a file: its inode number or ETag, its size in bytes, and its modification time."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as listed by its folder.

    Attributes:
        modified_ns: Modification time, for ordering files of the same folder.
    """

    name: str
    identity: Identity
    modified_ns: int


@dataclass(frozen=True, order=True)
class RemotePath:
    """A path in a store, with the methods of `pathlib.Path` that Phalanx uses.

    Args:
        url: A URL such as `s3://bucket/run`.
    """

    url: str

    def __post_init__(self) -> None:
        scheme, _, rest = self.url.partition(SEPARATOR)
        object.__setattr__(self, "url", f"{scheme}{SEPARATOR}{rest.rstrip('/')}")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}" if self.name else f"{self.url}{name}")

    @property
    def name(self) -> str:
        """The last component."""
        return self.url.partition(SEPARATOR)[2].rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The parent folder; for a bucket, the store itself."""
        scheme, _, rest = self.url.partition(SEPARATOR)
        return RemotePath(f"{scheme}{SEPARATOR}{rest.rpartition('/')[0]}")

    def with_name(self, name: str) -> RemotePath:
        """The path of another file in the same folder."""
        return self.parent / name

    def absolute(self) -> RemotePath:
        """The path itself: a URL does not depend on the working directory."""
        return self

    def exists(self) -> bool:
        """Whether there is a file with this name, or files below it."""
        with self._store() as (store, path):
            return _info(store, path) is not None

    def is_dir(self) -> bool:
        """Whether there are files below this path."""
        with self._store() as (store, path):
            found = _info(store, path)
            return found is not None and found["type"] == "directory"

    def files(self) -> list[StoredFile]:
        """The files in this folder; empty if there is no such folder."""
        with self._store() as (store, path):
            try:
                entries = store.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            # A store may list the folder's marker object as one of its files.
            return [_stored_file(e) for e in entries if e["type"] == "file" and e["name"].strip("/") != path.strip("/")]

    def info(self) -> StoredFile:
        """The entry of this file in its folder. Raises: FileNotFoundError."""
        with self._store() as (store, path):
            return _stored_file(store.info(path))

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Create the folder if the store has folders; it may exist."""
        with self._store() as (store, path):
            if _scheme(self.url) in _SCHEMES_WITH_FOLDERS:
                store.makedirs(path, exist_ok=True)

    def read_bytes(self) -> bytes:
        """The content of the file."""
        with self._store() as (store, path):
            return bytes(store.cat_file(path))

    def read_end(self, count: int) -> bytes:
        """The last bytes of the content, at most `count`."""
        with self._store() as (store, path):
            return bytes(store.cat_file(path, start=max(0, store.size(path) - count)))

    def download(self, target: Path) -> None:
        """Copy the file to a local file."""
        with self._store() as (store, path):
            store.get_file(path, os.fspath(target))

    def write(self, write: Callable[[BinaryIO], None]) -> None:
        """Write the content as a stream. If that fails, part of it may remain."""
        with self._store() as (store, path), store.open(path, "wb") as file:
            write(file)

    def replace(self, target: RemotePath) -> None:
        """Rename the file within its store. The target keeps its old content until the new content is complete."""
        with self._store() as (store, path):
            to = store._strip_protocol(target.url)
            if _scheme(self.url) in _SCHEMES_WITH_FOLDERS:
                store.mv(path, to)
            else:
                # A process killed in between leaves both names, each with complete content.
                store.cp_file(path, to)
                store.rm_file(path)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        with self._store() as (store, path):
            try:
                store.rm_file(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def open(self, mode: str = "r", **options: Any) -> Any:
        """Open the file like the built-in `open`. Written content appears when the file is closed."""
        with self._store() as (store, path):
            return store.open(path, mode, **options)

    @contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:
        """Context that yields the store, without cached listings of this folder, and the path in the store."""
        fsspec = importlib.import_module("fsspec")
        try:
            store, path = fsspec.core.url_to_fs(self.url)
            store.invalidate_cache(path)
            store.invalidate_cache(store._parent(path))
            yield store, path
        except (OSError, NotImplementedError):
            raise
        except Exception as error:
            # Error classes of the packages, such as botocore's for a host that does not respond.
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.url) from error


def _info(store: Any, path: str) -> Any:
    """The store's description of a path; None if there is nothing. (fsspec's `exists` and `isdir` also return False on
    errors.)"""
    try:
        return store.info(path)
    except FileNotFoundError:
        return None


def has_store(url: str) -> bool:
    """Whether the packages for the store of a URL are installed."""
    return not _missing_package(url)


def check_store(url: str, argument: str) -> None:
    """Raise ConfigurationError, naming what to install, unless the packages for the store of a URL are installed."""
    scheme = _scheme(url)
    missing = _missing_package(url)
    if missing == scheme:
        raise ConfigurationError(
            f"{argument} is {url!r}, and fsspec knows no store {scheme}{SEPARATOR}. Write the scheme of one that it "
            f"knows, such as s3, gs, abfs or hf, or register it with fsspec.register_implementation()."
        )
    if missing:
        raise ConfigurationError(
            f"{argument} is {url!r}, which needs the package {missing}: pip install {missing}. A mounted bucket "
            f"(gcsfuse, mountpoint-s3) needs none: pass its folder."
        )


def _missing_package(url: str) -> str:
    """The missing package for the store of a URL; the scheme itself if it is unknown; empty if nothing is missing."""
    if importlib.util.find_spec("fsspec") is None:
        return "fsspec"
    scheme = _scheme(url)
    registry = importlib.import_module("fsspec.registry")
    try:
        registry.get_filesystem_class(scheme)
    except ValueError:
        return scheme
    except ImportError:
        return str(registry.known_implementations[scheme]["class"]).partition(".")[0]
    return ""


def _stored_file(entry: Any) -> StoredFile:
    written = next((entry[key] for key in ("LastModified", "last_modified", "mtime", "created") if entry.get(key)), 0)
    tag = next((entry[key] for key in ("ETag", "etag", "generation", "blob_id", "ino") if entry.get(key)), "")
    if isinstance(written, str):
        written = datetime.fromisoformat(written)
    seconds = written.timestamp() if isinstance(written, datetime) else float(written)
    # The precision of an object's time differs between listings and single lookups; its tag is sufficient.
    identity = (str(tag).strip('"'), int(entry["size"] or 0), 0 if tag else seconds)
    return StoredFile(_name(entry), identity, int(seconds * 1e9))


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _scheme(url: str) -> str:
    """`s3` of `s3://bucket` and of `simplecache::s3://bucket`."""
    return url.partition(SEPARATOR)[0].rpartition("::")[2]
