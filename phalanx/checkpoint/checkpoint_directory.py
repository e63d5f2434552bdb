"""A directory of checkpoints of one model: each is written whole or not at all, and the newest whole one is found.

A checkpoint is one file, so that it exists or not: what Keras's `save_weights` writes (weights, layer state, and the
optimizer's variables, which `.weights.h5` contains as well), and behind it a seal:

    Keras's HDF5 | state as JSON | SHA-256 of both | length of the JSON, 8 bytes | SEAL

HDF5 does not read beyond its own end, so `model.load_weights` reads the file as it is. Not a `.keras` file: that builds
the model from the configuration of its layers, which a model with custom classes or functions may not have, while the
program that restores has the model anyway.

The file is built in memory, written under a temporary name in the same directory, flushed to the disk, and then
renamed. A process that is killed leaves a file that is ignored; the digest detects a disk that loses blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import keras

from phalanx.checkpoint.step_paths import check_keep, path_of_step, paths_by_step
from phalanx.config.local_paths import local_path
from phalanx.errors import ConfigurationError
from phalanx.keras_compat.keras_internals import serialize_weights
from phalanx.runtime.write_claim import WriteClaim
from phalanx.version import __version__

logger = logging.getLogger(__name__)

SUFFIX = ".weights.h5"
DEFAULT_BASENAME = "model.ckpt"
CONTENT = "content"
"""Key in the state: the digest of Keras's part. The same step may be saved again, when only the state has changed."""
DAMAGED = ".damaged"
"""Appended to the name of a checkpoint that cannot be read, when an older one was restored instead."""
ABANDONED = ".abandoned"
"""Appended to the name of a checkpoint when one of an earlier step has been written after it."""

_SEAL = b"PHALANX\x01"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8
_END_BYTES = _DIGEST_BYTES + _LENGTH_BYTES + len(_SEAL)
"""Names sort like steps up to a billion; beyond, the numbers are compared."""

Snapshot = memoryview
"""A model's weights and optimizer state at one moment, as HDF5."""


class DamagedCheckpointError(Exception):
    """A file is not a whole checkpoint: it lost bytes, or was never finished."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A whole checkpoint.

    Attributes:
        path: the checkpoint file.
        step: global step of the model.
        state: what else was saved, of JSON's types.
    """

    path: Path
    step: int
    state: Mapping[str, Any]


class CheckpointDirectory:
    """The checkpoints of one model in a directory. One process writes; any number may read at the same time.

    Args:
        directory: created with the first checkpoint.
        basename: their names begin with it.
        keep: how many of the newest are kept; None: all.
        generation: see `WriteClaim`.

    Attributes:
        claim: this process's right to write there; acquired by the first method that writes, unless earlier.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        basename: str = DEFAULT_BASENAME,
        keep: int | None = None,
        generation: Callable[[], int] = lambda: 0,
    ):
        check_keep(keep)
        self.directory = local_path(directory, "directory")
        self._basename = basename
        self._keep = keep
        self.claim = WriteClaim(self.directory, basename, generation)

    def is_at(self, path: Path) -> bool:
        """Whether a path consists of this directory and basename."""
        return path.name == self._basename and path.parent.absolute() == self.directory.absolute()

    def path_of(self, step: int) -> Path:
        return path_of_step(self.directory, self._basename, SUFFIX, step)

    def paths(self) -> list[Path]:
        """All checkpoints, damaged ones included, in the order of their steps."""
        return [path for _, path in paths_by_step(self.directory, self._basename, SUFFIX)]

    def save(self, model: Any, step: int, state: Mapping[str, Any] | None = None) -> Path:
        """Write the model's present weights and optimizer state; then delete the checkpoints that are not kept.

        Args:
            step: global step of the model.
            state: what else to save, of JSON's types.

        Raises:
            OSError: the checkpoint cannot be written; no partial file is left, and older ones are kept.
            ConfigurationError, SupersededError: see `WriteClaim.acquire`.
        """
        return self.write(serialize_weights(model), step, state)

    def write(self, content: Snapshot, step: int, state: Mapping[str, Any] | None = None) -> Path:
        """As `save`, from a snapshot of the model; in any thread, one at a time."""
        path = self.path_of(step)
        saved_state = {
            "step": step,
            "time": time.time(),
            "keras": keras.__version__,
            "phalanx": __version__,
            **(state or {}),
        }
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with _temporary(path) as temporary:
                with open(temporary, "wb") as file:
                    _write_sealed(file, content, saved_state)
                    file.flush()
                    os.fsync(file.fileno())
                with self.claim.writing():
                    os.replace(temporary, path)
                    sync_directory(self.directory)
                    self._set_aside(path)
                    self._delete_old()
        except OSError as error:
            raise OSError(
                error.errno or errno.EIO,
                f"The checkpoint of step {step} cannot be written ({error.strerror or error}). Check the free space "
                f"and the permissions of its directory",
                str(self.directory),
            ) from error
        return path

    def restore(self, model: Any, *, tidy: bool = True) -> StoredCheckpoint | None:
        """Put the newest whole checkpoint into the model; None if there are no checkpoints.

        Damaged checkpoints are skipped with a warning.

        Args:
            tidy: whether to rename damaged checkpoints, so that they are not found again.

        Raises: ConfigurationError if it is of another model, or if there are checkpoints and none is whole.
        """
        checkpoint, damaged = self._newest()
        if checkpoint is not None:
            load(model, checkpoint.path)
            if damaged and tidy:
                with self.claim.writing():
                    for other in damaged:
                        os.replace(other, other.with_name(other.name + DAMAGED))
        return checkpoint

    def newest(self) -> StoredCheckpoint | None:
        """The newest whole checkpoint; None if there are no checkpoints. Damaged ones are skipped with a warning.

        Raises: ConfigurationError if there are checkpoints and none is whole; OSError if they cannot be read.
        """
        return self._newest()[0]

    def _newest(self) -> tuple[StoredCheckpoint | None, list[Path]]:
        """The newest whole checkpoint, and the damaged ones that are newer."""
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.paths()):
            try:
                return read(path), [path for path, _ in damaged]
            except DamagedCheckpointError as error:
                logger.warning("%s Trying the one before.", error)
                damaged.append((path, str(error)))
        if damaged:
            raise ConfigurationError(
                f"None of the checkpoints in {self.directory} can be read: {damaged[0][1]} Move them away to start "
                f"from the beginning, or pass another directory."
            )
        return None, []

    def sweep(self) -> None:
        """Claim the directory, and delete partial files of these checkpoints that killed processes have left.

        Raises: ConfigurationError, SupersededError as `WriteClaim.acquire`.
        """
        # Where nothing can be written, checkpoints may still be read; the first that is written reports it.
        with contextlib.suppress(OSError), self.claim.writing():
            for path in self.directory.glob(f".{self._basename}-*"):
                path.unlink(missing_ok=True)

    def _set_aside(self, written: Path) -> None:
        """Rename checkpoints of later steps than the one that was just written: the training has gone back, and must
        not resume from them."""
        paths = self.paths()
        for path in paths[paths.index(written) + 1 :] if written in paths else ():
            os.replace(path, path.with_name(path.name + ABANDONED))

    def _delete_old(self) -> None:
        if self._keep is None:
            return
        abandoned = sorted(self.directory.glob(f"{self._basename}-*{SUFFIX}{ABANDONED}"), key=os.path.getmtime)
        for path in [*self.paths()[: -self._keep], *abandoned[: -self._keep]]:
            path.unlink(missing_ok=True)


def read(path: Path) -> StoredCheckpoint:
    """A checkpoint's step and state, after its digest was verified.

    Raises:
        DamagedCheckpointError: the file is not whole.
        OSError: it does not exist, or cannot be read.
    """
    with open(path, "rb") as file:
        end = _end_of(file)
        if end is None:
            raise DamagedCheckpointError(f"{path} is damaged: it has no seal, so it was cut off.")
        digest, length = end
        body_bytes = os.fstat(file.fileno()).st_size - _END_BYTES
        file.seek(0)
        found = hashlib.sha256()
        for block in _blocks(file, body_bytes):
            found.update(block)
        if found.digest() != digest or length > body_bytes:
            raise DamagedCheckpointError(f"{path} is damaged: its content is not what was written.")
        file.seek(body_bytes - length)
        try:
            state = json.loads(file.read(length))
            return StoredCheckpoint(path, int(state["step"]), state)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise DamagedCheckpointError(f"{path} is damaged: its state is no checkpoint's ({error!r}).") from error


def is_sealed(path: Path) -> bool:
    """Whether a file ends with Phalanx's seal, and so was complete when it got its name."""
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
            f"The checkpoint {path} is of another model: {error} Build the model that it was saved from, or pass "
            f"another directory."
        ) from error


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk, so that they survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems do not support it
        if error.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def copy_atomically(source: Path, target: Path) -> None:
    """Copy a file, so that the target is the former file or the whole new one at all times."""
    with _temporary(target) as temporary:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    sync_directory(target.parent)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A temporary name for a file of this process, in the same directory; removed on exit if it still exists."""
    # Keras requires its suffix. The dot hides the file from readers of checkpoints.
    stem = path.name.removesuffix(SUFFIX)
    # Processes of two containers may have the same process id.
    temporary = path.with_name(f".{stem}.{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")
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
    """The digest and the length of the state, from the end of a file; None if it does not end with the seal."""
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
