"""A directory of checkpoints of one model: each is written whole or not at all, and the newest whole one is found.

A checkpoint is one file, so that it is there or not: what Keras's `save_weights` writes (weights, layer state, and the
optimizer's variables, which `.weights.h5` holds as well), and behind it a seal of ours:

    Keras's HDF5 | state as JSON | SHA-256 of both | length of the JSON, 8 bytes | SEAL

HDF5 does not look behind its own end, so `model.load_weights` reads the file as it is. Not a `.keras` file: that is
made anew from the description of its layers, which a model with a class or function of its own may not have, while the
program that restores has the model anyway.

It is made in memory, written beside its place under a name that nobody looks at, flushed to the disk, and then renamed.
A process that is killed leaves a file that is not looked at; a disk that loses blocks is found out by the sum.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import keras
from keras.src.saving import saving_lib

from phalanx.errors import ConfigurationError
from phalanx.version import __version__

logger = logging.getLogger(__name__)

SUFFIX = ".weights.h5"
DEFAULT_BASENAME = "model.ckpt"
CONTENT = "content"
"""In the state: the sum of Keras's part. The same step may be saved again, when only the state has changed."""
DAMAGED = ".damaged"
"""Appended to the name of a checkpoint that cannot be read, when an older one has taken its place."""
ABANDONED = ".abandoned"
"""Appended to the name of a checkpoint when one of an earlier step has been written after it."""

_SEAL = b"PHALANX\x01"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8
_END_BYTES = _DIGEST_BYTES + _LENGTH_BYTES + len(_SEAL)
_STEP_DIGITS = 9
"""So that the order of names is that of steps up to a billion; beyond, they are compared as numbers."""

Snapshot = memoryview
"""A model's weights and optimizer state at one moment, as HDF5."""


class DamagedCheckpointError(Exception):
    """A file is no whole checkpoint: it lost bytes, or was never finished."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A whole checkpoint.

    Attributes:
        step: the global step of which it is.
        state: what else was noted: numbers and strings.
    """

    path: Path
    step: int
    state: Mapping[str, Any]


class CheckpointDirectory:
    """The checkpoints of one model in a directory. One process writes; any number may read meanwhile.

    Args:
        basename: their names begin with it.
        keep: how many of the newest stay; None: all.
    """

    def __init__(self, directory: str | os.PathLike[str], *, basename: str = DEFAULT_BASENAME, keep: int | None = None):
        if keep is not None and keep < 1:
            raise ConfigurationError(f"{keep} checkpoints are to be kept: write a number from 1 up, or None for all.")
        self.directory = Path(directory)
        self._basename = basename
        self._keep = keep
        self._pattern = re.compile(re.escape(basename) + r"-(\d+)" + re.escape(SUFFIX))

    def is_at(self, path: Path) -> bool:
        """Whether a path is this directory and the beginning of these names."""
        return path.name == self._basename and path.parent.absolute() == self.directory.absolute()

    def path_of(self, step: int) -> Path:
        return self.directory / f"{self._basename}-{step:0{_STEP_DIGITS}}{SUFFIX}"

    def paths(self) -> list[Path]:
        """All that are there, damaged ones included, by step."""
        try:
            names = os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [(int(match[1]), name) for name in names if (match := self._pattern.fullmatch(name))]
        return [self.directory / name for _, name in sorted(found)]

    def save(self, model: Any, step: int, state: Mapping[str, Any] | None = None) -> Path:
        """Write the model's weights and optimizer state, as they are now; then delete those that are not to be kept.

        Args:
            state: more to note, of JSON's types.

        Raises: OSError, if it cannot be written; nothing half-written is left, and the older ones stay.
        """
        return self.write(snapshot(model), step, state)

    def write(self, content: Snapshot, step: int, state: Mapping[str, Any] | None = None) -> Path:
        """As `save`, with what the model was when the snapshot was taken; in any thread, one at a time."""
        place = self.path_of(step)
        noted = {"step": step, "time": time.time(), "keras": keras.__version__, "phalanx": __version__, **(state or {})}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with _temporary(place) as temporary:
                with open(temporary, "wb") as file:
                    _write_sealed(file, content, noted)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, place)
            sync_directory(self.directory)
        except OSError as error:
            raise OSError(
                error.errno or errno.EIO,
                f"The checkpoint of step {step} cannot be written ({error.strerror or error}). Look at the free space "
                f"and the permissions of its directory",
                str(self.directory),
            ) from error
        self._set_aside(place)
        self._forget_old()
        return place

    def restore(self, model: Any, *, tidy: bool = True) -> StoredCheckpoint | None:
        """Put the newest whole checkpoint into the model; None if there is none at all.

        One that is damaged is skipped with a warning, and then, with `tidy`, renamed, so that it is not the newest
        forever.

        Raises: ConfigurationError if it is of another model, or if there are checkpoints and none is whole.
        """
        checkpoint, damaged = self._newest()
        if checkpoint is not None:
            load(model, checkpoint.path)
            for other in damaged if tidy else ():
                os.replace(other, other.with_name(other.name + DAMAGED))
        return checkpoint

    def newest(self) -> StoredCheckpoint | None:
        """The newest whole checkpoint; None if there is none at all. One that is damaged is skipped with a warning.

        Raises: ConfigurationError if there are checkpoints and none is whole; OSError if they cannot be read.
        """
        return self._newest()[0]

    def _newest(self) -> tuple[StoredCheckpoint | None, list[Path]]:
        """And those that are newer but damaged."""
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.paths()):
            try:
                return read(path), [path for path, _ in damaged]
            except DamagedCheckpointError as error:
                logger.warning("%s Trying the one before.", error)
                damaged.append((path, str(error)))
        if damaged:
            raise ConfigurationError(
                f"None of the checkpoints in {self.directory} can be read: {damaged[0][1]} Move them away to begin "
                f"anew, or give another directory."
            )
        return None, []

    def sweep(self) -> None:
        """Delete what processes that were killed have left half-written, of files whose names begin like those of the
        checkpoints. Call where nobody else writes."""
        for path in self.directory.glob(f".{self._basename}-*"):
            path.unlink(missing_ok=True)

    def _set_aside(self, place: Path) -> None:
        """Rename those of later steps than the one that was just written: the training has gone back, and does not go
        on from them."""
        paths = self.paths()
        for path in paths[paths.index(place) + 1 :] if place in paths else ():
            os.replace(path, path.with_name(path.name + ABANDONED))

    def _forget_old(self) -> None:
        if self._keep is None:
            return
        abandoned = sorted(self.directory.glob(f"{self._basename}-*{SUFFIX}{ABANDONED}"), key=os.path.getmtime)
        for path in [*self.paths()[: -self._keep], *abandoned[: -self._keep]]:
            path.unlink(missing_ok=True)


def snapshot(model: Any) -> Snapshot:
    """What `model.save_weights` would write, in memory.

    Not in the file itself: HDF5 that cannot write, on a full disk, ends the whole process with a segmentation fault.
    """
    buffer = io.BytesIO()
    store = saving_lib.H5IOStore(buffer, mode="w")
    try:
        saving_lib._save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set())
    finally:
        store.close()
    return buffer.getbuffer()


def read(path: Path) -> StoredCheckpoint:
    """What a checkpoint says of itself, after all of it was compared with its sum.

    Raises:
        DamagedError: it is not whole.
        OSError: it is not there, or cannot be read.
    """
    with open(path, "rb") as file:
        end = _end_of(file)
        if end is None:
            raise DamagedCheckpointError(f"{path} is damaged: it has no end, so it was cut off.")
        digest, length = end
        body_bytes = os.fstat(file.fileno()).st_size - _END_BYTES
        file.seek(0)
        found = hashlib.sha256()
        for block in _blocks(file, body_bytes):
            found.update(block)
        if found.digest() != digest or length > body_bytes:
            raise DamagedCheckpointError(f"{path} is damaged: its content is not what was written.")
        file.seek(body_bytes - length)
        state = json.loads(file.read(length))
    return StoredCheckpoint(path, int(state["step"]), state)


def is_sealed(path: Path) -> bool:
    """Whether a file is one of ours, and so was renamed to its name when it was whole."""
    with open(path, "rb") as file:
        return _end_of(file) is not None


def load(model: Any, path: Path) -> None:
    """Put weights and optimizer state of a whole checkpoint into a model.

    Raises: ConfigurationError if it is of another model.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    try:
        model.load_weights(path)
    except (ValueError, KeyError) as error:
        raise ConfigurationError(
            f"The checkpoint {path} is of another model: {error} Build the model that it was saved of, or give another "
            f"directory."
        ) from error


def sync_directory(directory: Path) -> None:
    """See to it that names in a directory outlive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems have no such thing
        if error.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def put(source: Path, place: Path) -> None:
    """Copy a file to a place, where it appears whole."""
    with _temporary(place) as temporary:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, place)
    sync_directory(place.parent)


@contextlib.contextmanager
def _temporary(place: Path) -> Iterator[Path]:
    """A name beside a file's own, for this process alone; nothing has it afterwards."""
    # Keras wants its suffix. The dot hides it from those who look for checkpoints.
    stem = place.name.removesuffix(SUFFIX)
    # Processes of two containers may have the same number.
    temporary = place.with_name(f".{stem}.{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _write_sealed(file: BinaryIO, content: Snapshot, state: Mapping[str, Any]) -> None:
    digest = hashlib.sha256(content)
    body = json.dumps({**state, CONTENT: digest.hexdigest()}).encode()
    digest.update(body)
    file.write(content)
    file.write(body + digest.digest() + len(body).to_bytes(_LENGTH_BYTES, "big") + _SEAL)


def _end_of(file: BinaryIO) -> tuple[bytes, int] | None:
    """The sum and the length of the state, as the end of a file says; None if it does not end with a seal."""
    if os.fstat(file.fileno()).st_size < _END_BYTES:
        return None
    file.seek(-_END_BYTES, os.SEEK_END)
    end = file.read(_END_BYTES)
    if not end.endswith(_SEAL):
        return None
    return end[:_DIGEST_BYTES], int.from_bytes(end[_DIGEST_BYTES : _DIGEST_BYTES + _LENGTH_BYTES], "big")


def _blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The next `size` bytes of a file, in pieces."""
    while size > 0:
        block = file.read(min(size, 1 << 20))
        if not block:
            return
        size -= len(block)
        yield block
