"""A file or a folder in a store: what `pathlib.Path` is in a file system, through `fsspec`.

Most stores have no folders, and none has locks. They put a whole object under its name, or nothing. What a store's
package raises becomes an `OSError`, so that callers treat an unreachable store like a disk that fails.
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
_WITH_FOLDERS = frozenset({"arrow_hdfs", "dbfs", "file", "ftp", "hdfs", "local", "sftp", "smb", "ssh", "webhdfs"})
"""Stores in which a file needs a folder. In others, to create a folder may create a bucket."""

Identity = tuple[object, int, object]
"""Differs between two contents of a file: its number in the file system or its ETag; its bytes; when it was changed."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as a folder lists it.

    Attributes:
        written_ns: When, to order files of the same folder.
    """

    name: str
    identity: Identity
    written_ns: int


@dataclass(frozen=True, order=True)
class RemotePath:
    """A path in a store, with those methods of `pathlib.Path` that Phalanx uses.

    Args:
        url: Such as `s3://bucket/run`.
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
        """The last part."""
        return self.url.partition(SEPARATOR)[2].rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder; of a bucket the store itself."""
        scheme, _, rest = self.url.partition(SEPARATOR)
        return RemotePath(f"{scheme}{SEPARATOR}{rest.rpartition('/')[0]}")

    def with_name(self, name: str) -> RemotePath:
        """Another file in the same folder."""
        return self.parent / name

    def absolute(self) -> RemotePath:
        """Itself: a URL depends on no working directory."""
        return self

    def exists(self) -> bool:
        """Whether there is a file of this name, or files below it."""
        with self._store() as (store, path):
            return _info(store, path) is not None

    def is_dir(self) -> bool:
        """Whether there are files below it."""
        with self._store() as (store, path):
            found = _info(store, path)
            return found is not None and found["type"] == "directory"

    def files(self) -> list[StoredFile]:
        """The files of this folder; none if there is no such folder."""
        with self._store() as (store, path):
            try:
                entries = store.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            # A store may list a folder's own marker in it.
            return [_stored_file(e) for e in entries if e["type"] == "file" and e["name"].strip("/") != path.strip("/")]

    def described(self) -> StoredFile:
        """As its folder lists it. Raises: FileNotFoundError."""
        with self._store() as (store, path):
            return _stored_file(store.info(path))

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Create the folder where the store has folders; it may exist."""
        with self._store() as (store, path):
            if _scheme(self.url) in _WITH_FOLDERS:
                store.makedirs(path, exist_ok=True)

    def read_bytes(self) -> bytes:
        """The content."""
        with self._store() as (store, path):
            return bytes(store.cat_file(path))

    def read_end(self, count: int) -> bytes:
        """The last bytes of the content, at most so many."""
        with self._store() as (store, path):
            return bytes(store.cat_file(path, start=max(0, store.size(path) - count)))

    def download(self, target: Path) -> None:
        """Copy it to a local file."""
        with self._store() as (store, path):
            store.get_file(path, os.fspath(target))

    def write(self, write: Callable[[BinaryIO], None]) -> None:
        """Write the content as a stream. If that fails, a part of it may be there."""
        with self._store() as (store, path), store.open(path, "wb") as file:
            write(file)

    def replace(self, target: RemotePath) -> None:
        """Move it to another name of the same store, whose former content is there until the new one is."""
        with self._store() as (store, path):
            to = store._strip_protocol(target.url)
            if _scheme(self.url) in _WITH_FOLDERS:
                store.mv(path, to)
            else:
                # A process that is killed in between leaves both names, each whole.
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
        """As the built-in `open`. What is written appears when the file is closed."""
        with self._store() as (store, path):
            return store.open(path, mode, **options)

    @contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:
        """The store, without what it remembers of this folder, which others change, and the path in it."""
        fsspec = importlib.import_module("fsspec")
        try:
            store, path = fsspec.core.url_to_fs(self.url)
            store.invalidate_cache(path)
            store.invalidate_cache(store._parent(path))
            yield store, path
        except (OSError, NotImplementedError):
            raise
        except Exception as error:
            # The packages' own classes, such as botocore's for a host that does not answer.
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.url) from error


def _info(store: Any, path: str) -> Any:
    """A store's description of a path; None if there is nothing. (fsspec's `exists` and `isdir` mean an error by "no",
    too.)"""
    try:
        return store.info(path)
    except FileNotFoundError:
        return None


def has_store(url: str) -> bool:
    """Whether the packages for the store of a URL are installed."""
    return not _missing_package(url)


def check_store(url: str, argument: str) -> None:
    """Raise ConfigurationError, naming what to install, unless the packages for the store of a URL are there."""
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
    # The time of an object has another precision in a list than alone; its tag says all.
    identity = (str(tag).strip('"'), int(entry["size"] or 0), 0 if tag else seconds)
    return StoredFile(_name(entry), identity, int(seconds * 1e9))


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _scheme(url: str) -> str:
    """`s3` of `s3://bucket` and of `simplecache::s3://bucket`."""
    return url.partition(SEPARATOR)[0].rpartition("::")[2]
