"""Finds new, complete checkpoints in a directory: those of a `Supervisor`, and files of Keras's `ModelCheckpoint`.

A `Supervisor` renames its files when they are complete. Keras writes in place, so its files are visible while they are
being written, can be read only after they have been unchanged for a while, and may be written again. Nothing that locks
a file opens it in place: HDF5 refuses to *write* a file that another process has open, so an evaluator would make the
training fail. Evaluation uses a copy, made while the file did not change.

              seen, or written again            complete, and unchanged for DELIVERY_TIMEOUT_S
    absent  ------------------------> pending -------------------------------------> taken
                                         |      still incomplete GIVE_UP_S after the last write
                                         +---------------------------------------------------> given up, with a warning
"""

from __future__ import annotations

import enum
import logging
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py

from phalanx.checkpoint import checkpoint_directory
from phalanx.checkpoint.checkpoint_directory import DamagedCheckpointError
from phalanx.checkpoint.step_names import KERAS_SUFFIX, WEIGHTS_SUFFIX, last_number
from phalanx.storage.files import copy_if_unchanged, list_files
from phalanx.storage.paths import StoragePath
from phalanx.storage.remote_path import Identity

logger = logging.getLogger(__name__)

DELIVERY_TIMEOUT_S = 1.0
"""How long Keras's file must be unchanged: longer than a write pauses within a file, on a busy disk."""
GIVE_UP_S = 30.0
"""How long after its last change an incomplete file may still become complete: a network file system shows the size of
a file before its content."""

_WEIGHTS_IN_KERAS = "model.weights.h5"


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint, copied to a private folder.

    Attributes:
        name: Name of the file in the directory.
        copy: Path of the copy.
        weights: File for `model.load_weights`; `copy` itself, or a file extracted from it.
        step: Global step of the checkpoint, if known: the optimizer's iterations, else a number in its name.
        content_id: Identifier of the weights and the optimizer's state; empty for a file of Keras.
    """

    name: str
    copy: Path
    weights: Path
    step: int
    content_id: str = ""


class _State(enum.Enum):
    PENDING = "pending"
    DONE = "done"


@dataclass
class _File:
    identity: Identity
    since: float  # when this content was first seen, by the watcher's clock: the file system's may differ
    state: _State = _State.PENDING


class CheckpointWatcher:
    """Finds the checkpoints in a directory, each once, in the order of writing.

    Args:
        scratch: Directory for copies; only the last copy is kept.
        ignored: Prefix of file names that are not checkpoints of the training.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self, directory: StoragePath, scratch: Path, *, ignored: str = "", clock: Callable[[], float] = time.monotonic
    ):
        self._directory = directory
        self._scratch = scratch
        self._ignored = ignored
        self._clock = clock
        self._files: dict[str, _File] = {}  # existing files, by name
        self._content_ids: dict[str, str] = {}  # of the checkpoints taken
        self._began = self._is_there = False  # whether a first one was taken; whether the directory exists

    @property
    def pending(self) -> bool:
        """Whether there is a file that may become a checkpoint."""
        return self._is_there and any(file.state is _State.PENDING for file in self._files.values())

    def next(self) -> FoundCheckpoint | None:
        """Return the next new checkpoint; None if there is none yet. The previous copy is deleted.

        The first is the newest one present; older ones are skipped.

        Raises: OSError if the directory cannot be read, unless it is in an object store and has been read before.
        """
        try:
            return self._next()
        except OSError as error:
            if isinstance(self._directory, Path) or not self._is_there:
                raise
            logger.warning("%s cannot be read: %s. Trying again.", self._directory, error)
            return None

    def _next(self) -> FoundCheckpoint | None:
        names = self._scan()
        if self._began:
            return next((found for name in names if (found := self._take(name)) is not None), None)
        # The first one is the newest complete checkpoint. A newer, incomplete one stays pending.
        for index in reversed(range(len(names))):
            found = self._take(names[index])
            if found is not None:
                self._began = True
                for older in names[:index]:
                    self._files[older].state = _State.DONE
                return found
        return None

    def retry_later(self, found: FoundCheckpoint) -> bool:
        """Make an unusable checkpoint pending again; return False if it can no longer change."""
        file = self._files.get(found.name)
        if file is None or checkpoint_directory.is_sealed(found.copy) or self._clock() - file.since >= GIVE_UP_S:
            return False
        file.state = _State.PENDING
        return True

    def _scan(self) -> list[str]:
        """Return the names of the pending files, in the order of their last write."""
        try:
            files = [file for file in list_files(self._directory) if self._is_checkpoint(file.name)]
            self._is_there = True
        except FileNotFoundError:  # not created yet, or temporarily missing: what was taken is remembered
            self._is_there = False
            return []
        times: dict[str, tuple[int, str]] = {}
        for file in files:
            known = self._files.get(file.name)
            if known is None or known.identity != file.identity:
                self._files[file.name] = _File(file.identity, self._clock())
            times[file.name] = (file.modified_ns, file.name)
        for name in self._files.keys() - times.keys():
            self._content_ids.pop(name, None)
            if self._files.pop(name).state is _State.PENDING:
                logger.info("%s was deleted before its turn.", self._directory / name)
        return sorted((n for n in times if self._files[n].state is _State.PENDING), key=lambda name: times[name])

    def _is_checkpoint(self, name: str) -> bool:
        if name.startswith(".") or (self._ignored and name.startswith(self._ignored)):
            return False
        return name.endswith((WEIGHTS_SUFFIX, KERAS_SUFFIX))

    def _take(self, name: str) -> FoundCheckpoint | None:
        """Return the file as a checkpoint; None if it is not ready, or never will be."""
        file, path, is_phalanx_file = self._files[name], self._directory / name, False
        try:
            # Read in place without HDF5, which would lock it: the seal follows Keras's part.
            is_phalanx_file = checkpoint_directory.is_sealed(path)  # if so, it is never again written in place
            alone_s = self._clock() - file.since
            if not is_phalanx_file and alone_s < DELIVERY_TIMEOUT_S:
                return None
            for old in self._scratch.iterdir():
                old.unlink()
            copy = self._scratch / name
            if not copy_if_unchanged(path, file.identity, copy):  # still being written
                return None
            found = _open(name, copy, self._scratch)
        except FileNotFoundError:
            return None
        except DamagedCheckpointError as error:
            if is_phalanx_file or self._clock() - file.since >= GIVE_UP_S:
                logger.warning("%s is left out: %s", path, error)
                file.state = _State.DONE
            return None
        file.state = _State.DONE
        if found.content_id and self._content_ids.get(name) == found.content_id:
            return None  # saved again: the same weights, in a later epoch
        self._content_ids[name] = found.content_id
        return found


def _open(name: str, copy: Path, scratch: Path) -> FoundCheckpoint:
    """Open a copy of a checkpoint.

    Raises: DamagedCheckpointError if it is incomplete.
    """
    if checkpoint_directory.is_sealed(copy):
        saved = checkpoint_directory.read(copy)
        return FoundCheckpoint(name, copy, copy, saved.step, str(saved.state[checkpoint_directory.DIGEST_KEY]))
    weights = copy
    if name.endswith(KERAS_SUFFIX):
        weights = scratch / f"{name}{WEIGHTS_SUFFIX}"
        _extract(copy, weights)
    return FoundCheckpoint(name, copy, weights, _step_of(weights, name))


def _extract(archive: Path, weights: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as content:
            damaged = content.testzip()
            if damaged is not None:
                raise DamagedCheckpointError(f"its part {damaged} is damaged")
            with content.open(_WEIGHTS_IN_KERAS) as source, open(weights, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DamagedCheckpointError(f"it is not a complete Keras file ({error})") from error


def _step_of(weights: Path, name: str) -> int:
    """Return the optimizer's iterations from a weights file, and check the file by reading all of it."""
    try:
        with h5py.File(weights, "r") as file:
            file.visititems(lambda _, item: item[()] if isinstance(item, h5py.Dataset) and item.size else None)
            iterations = file.get("optimizer/vars/0")
            if isinstance(iterations, h5py.Dataset) and iterations.shape == ():
                return int(iterations[()])
    except (OSError, RuntimeError, KeyError) as error:
        raise DamagedCheckpointError(f"it is not a complete weights file ({error})") from error
    return last_number(name) or 0
