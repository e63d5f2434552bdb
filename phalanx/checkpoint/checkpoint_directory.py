"""A directory of checkpoints of one model. Each is written completely or not at all; the newest complete one is found.

A checkpoint is one file, so it either exists or does not. It holds what Keras's `save_weights` writes (weights, layer
state, and the optimizer's variables, which `.weights.h5` contains as well), followed by a seal:

    Keras's HDF5 | state as JSON | SHA-256 of both | length of the JSON, 8 bytes | SEAL

HDF5 does not read beyond its own end, so `model.load_weights` reads the file as it is. It is not a `.keras` file: that
rebuilds the model from its layers' configuration, which a model with custom classes or functions may not have, and the
program that restores has the model anyway.

The file is built in memory, written under a temporary name in the same directory, flushed to disk, and then renamed (a
store copies it to its name). A killed process leaves a file that is ignored; the digest detects a disk that loses
blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import keras

from phalanx.checkpoint.background_save import BackgroundSave, State
from phalanx.checkpoint.checkpoint_series import CheckpointSeries
from phalanx.checkpoint.step_names import STEP_DIGITS, WEIGHTS_SUFFIX, check_keep
from phalanx.errors import ConfigurationError
from phalanx.keras_compat.keras_internals import serialize_weights
from phalanx.runtime.write_claim import WriteClaim
from phalanx.storage.files import commit_file, list_names, local_copy, read_end, read_end_of, rename, staged_file
from phalanx.storage.paths import PathArgument, StoragePath, storage_path
from phalanx.version import __version__

logger = logging.getLogger(__name__)

DEFAULT_BASENAME = "model.ckpt"
DIGEST_KEY = "content"
"""Key in the state: the digest of Keras's part. The same step may be saved again when only the state has changed."""
DAMAGED_SUFFIX = ".damaged"
"""Suffix of a checkpoint that cannot be read, added when an older one was restored instead."""
LEDGER_SUFFIX = "ledger.json"
"""Suffix of `BASENAME-ledger.json`, the sample ledger of a `fit`, next to its checkpoints."""

_SEAL = b"PHALANX\x01"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8
_END_BYTES = _DIGEST_BYTES + _LENGTH_BYTES + len(_SEAL)
_BLOCK_BYTES = 1 << 23
"""Number of bytes written at once: a store's file keeps a copy of what one call writes."""

Snapshot = memoryview
"""A model's weights and optimizer state at one moment, as HDF5."""


class DamagedCheckpointError(Exception):
    """A file is not a complete checkpoint: it lost bytes, or was never finished."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint.

    Attributes:
        path: The checkpoint file.
        step: Global step of the model.
        state: Additional saved state, of JSON types.
    """

    path: StoragePath
    step: int
    state: Mapping[str, Any]


class CheckpointDirectory:
    """The checkpoints of one model in a directory. One process writes; any number may read at the same time.

    Args:
        directory: Directory of the checkpoints, created with the first one.
        basename: Prefix of the checkpoints' names.
        keep: Number of newest checkpoints to keep; None: all.
        generation: See `WriteClaim`.

    Attributes:
        claim: This process's right to write to the directory; acquired by the first method that writes, unless earlier.
        background: Writes what `begin` saves.
    """

    def __init__(
        self,
        directory: PathArgument,
        *,
        basename: str = DEFAULT_BASENAME,
        keep: int | None = None,
        generation: Callable[[], int] = lambda: 0,
    ):
        check_keep(keep)
        self.directory = storage_path(directory, "directory")
        self._basename = basename
        self._keep = keep
        self._series = CheckpointSeries(self.directory, basename, WEIGHTS_SUFFIX)
        self.claim = WriteClaim(self.directory, basename, generation)
        self.background = BackgroundSave("phalanx-checkpoint")

    def is_at(self, path: StoragePath) -> bool:
        """Whether a path consists of this directory and basename."""
        return path.name == self._basename and path.parent.absolute() == self.directory.absolute()

    def path_of(self, step: int) -> StoragePath:
        return self.directory / self._series.name_of(step)

    def paths(self) -> list[StoragePath]:
        """All checkpoints, including damaged ones, in the order of their steps."""
        return [path for _, path in self._series.by_step()]

    def save(self, model: Any, step: int, state: Mapping[str, Any] | None = None) -> StoragePath:
        """Write the model's current weights and optimizer state, then delete the checkpoints that are not kept.

        Args:
            step: Global step of the model.
            state: Additional state to save, of JSON types.

        Raises:
            OSError: the checkpoint cannot be written; no partial file is left, and older ones are kept.
            ConfigurationError, SupersededError: see `WriteClaim.acquire`.
        """
        return self.write(serialize_weights(model), step, state)

    def begin(self, model: Any, step: int, state: State) -> None:
        """Save in the background, like `save`; call only after the previous save has ended."""
        content = serialize_weights(model)
        self.background.start(step, lambda: self.write(content, step, state()))

    def write(self, content: Snapshot, step: int, state: Mapping[str, Any] | None = None) -> StoragePath:
        """Save a snapshot of the model, like `save`; in any thread, one at a time."""
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
            # The upload takes long and happens outside the claim's lock; only a rename happens under it.
            with (
                staged_file(path, lambda file: _write_sealed(file, content, saved_state)) as whole,
                self.claim.writing(),
            ):
                commit_file(whole, path)
            with self.claim.writing():  # again: in a store, another process may have claimed it meanwhile
                # In this order: `delete_old` keeps the last ones by step, and would delete the one just written if
                # later ones were still among them.
                self._series.set_aside_after(step)
                self._series.delete_old(self._keep)
        except OSError as error:
            raise OSError(
                error.errno or errno.EIO,
                f"The checkpoint of step {step} cannot be written ({error.strerror or error}). Check the free space "
                f"and the permissions of its directory",
                str(self.directory),
            ) from error
        return path

    def restore(self, model: Any, *, rename_damaged: bool = True) -> StoredCheckpoint | None:
        """Load the newest complete checkpoint into the model; None if there are no checkpoints.

        Damaged checkpoints are skipped with a warning.

        Args:
            rename_damaged: Whether to rename damaged checkpoints, so that they are not found again.

        Raises: ConfigurationError if it is of another model, or if there are checkpoints and none is complete.
        """
        while True:
            checkpoint, damaged = self._newest()
            if checkpoint is None:
                return None
            try:
                load(model, checkpoint.path)
                break
            except FileNotFoundError:
                if checkpoint.path in self.paths():
                    raise
                # Its writer has deleted it meanwhile, and has written a newer one.
        if damaged and rename_damaged:
            with self.claim.writing():
                for other in damaged:
                    rename(other, other.with_name(other.name + DAMAGED_SUFFIX))
        return checkpoint

    def newest(self) -> StoredCheckpoint | None:
        """The newest complete checkpoint; None if there are no checkpoints. Damaged ones are skipped with a warning.

        Raises: ConfigurationError if there are checkpoints and none is complete; OSError if they cannot be read.
        """
        return self._newest()[0]

    def _newest(self) -> tuple[StoredCheckpoint | None, list[StoragePath]]:
        """The newest complete checkpoint, and the newer damaged ones."""
        paths = self.paths()
        while True:
            try:
                return self._newest_of(paths)
            except FileNotFoundError:
                former, paths = paths, self.paths()
                if paths == former:
                    raise
                # The writer has deleted it since it was listed, and has written newer ones.

    def _newest_of(self, paths: Sequence[StoragePath]) -> tuple[StoredCheckpoint | None, list[StoragePath]]:
        damaged: list[tuple[StoragePath, str]] = []
        for path in reversed(paths):
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

    def remove_partial_files(self) -> None:
        """Claim the directory, and delete partial files of these checkpoints that killed processes have left.

        Raises: ConfigurationError, SupersededError; see `WriteClaim.acquire`.
        """
        # A directory that is not writable may still be readable; the first write reports the error.
        with contextlib.suppress(OSError), self.claim.writing():
            remove_partial(self.directory, self._basename)


def read(path: StoragePath) -> StoredCheckpoint:
    """The checkpoint's step and state, after verifying its digest.

    Raises:
        DamagedCheckpointError: the file is not complete.
        OSError: it does not exist, or cannot be read.
    """
    # All from one descriptor: the step may be saved again meanwhile, under the same name.
    with local_copy(path) as copy, open(copy, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        end = _parse_end(read_end_of(file, _END_BYTES))
        if end is None:
            raise DamagedCheckpointError(f"{path} is damaged: it has no seal, so it was cut off.")
        digest, length = end
        # The digest does not cover the length: a damaged one selects bytes that are not the JSON of a state.
        body_bytes = size - _END_BYTES
        found = hashlib.sha256()
        file.seek(0)
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


def is_sealed(path: StoragePath) -> bool:
    """Whether a file ends with Phalanx's seal, and so was complete when it got its name."""
    return _parse_end(read_end(path, _END_BYTES)) is not None


def load(model: Any, path: StoragePath) -> None:
    """Load weights and optimizer state from a complete checkpoint into a model.

    Raises: ConfigurationError if it is of another model.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        # Keras loads nothing into an optimizer without variables, and only warns.
        optimizer.build(model.trainable_variables)
    try:
        with local_copy(path) as copy:
            model.load_weights(copy)
    except (ValueError, KeyError) as error:
        raise ConfigurationError(
            f"The checkpoint {path} is of another model: {error} Build the model that it was saved from, or pass "
            f"another directory."
        ) from error


def remove_partial(directory: StoragePath, basename: str) -> None:
    """Delete what killed processes have not finished. Call only under the `WriteClaim`, while this process writes
    nothing there."""
    # A staged file, or a folder of `ShardedCheckpoint`. The prefix alone would match `BASENAME-other-...`, which
    # another writer may be writing.
    rest = rf"\d{{{STEP_DIGITS},}}\.|{re.escape(LEDGER_SUFFIX)}\.|[0-9a-f]{{8}}(\.replaced)?$"
    partial = re.compile(rf"\.{re.escape(basename)}-({rest})")
    for name in list_names(directory):
        if not partial.match(name):
            continue
        path = directory / name
        if isinstance(path, Path) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _write_sealed(file: BinaryIO, content: Snapshot, state: Mapping[str, Any]) -> None:
    digest = hashlib.sha256(content)
    body = json.dumps({**state, DIGEST_KEY: digest.hexdigest()}).encode()
    digest.update(body)
    # HDF5 finds its superblock at offset 0, so the model comes first and Phalanx's parts follow.
    for begin in range(0, len(content), _BLOCK_BYTES):
        file.write(content[begin : begin + _BLOCK_BYTES])
    file.write(body + digest.digest() + len(body).to_bytes(_LENGTH_BYTES, "big") + _SEAL)


def _parse_end(end: bytes) -> tuple[bytes, int] | None:
    """The digest and the length of the state, from the end of a file; None if it does not end with the seal."""
    if len(end) < _END_BYTES or not end.endswith(_SEAL):
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
