"""The checkpoints of one kind in a directory, by step: which are kept, set aside, or deleted.

A checkpoint is a file, or a folder in a file system.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.step_names import name_of_step, names_by_step
from phalanx.storage.files import modified_ns, rename
from phalanx.storage.paths import StoragePath
from phalanx.storage.remote_path import RemotePath

ABANDONED_SUFFIX = ".abandoned"
"""Suffix of a checkpoint's name, added when one of an earlier step is written after it."""


@dataclass(frozen=True)
class CheckpointSeries:
    """Checkpoints whose names differ only by their steps. Methods that change them are called under the `WriteClaim`.

    Attributes:
        directory: Directory of the checkpoints.
        basename, suffix: Beginning and end of their names.
        are_folders: Whether each is a folder, else a file. Others with such a name are ignored.
    """

    directory: StoragePath
    basename: str
    suffix: str
    are_folders: bool = False

    def name_of(self, step: int) -> str:
        """The name of a step's checkpoint, whether or not it exists."""
        return name_of_step(self.basename, self.suffix, step)

    def by_step(self) -> list[tuple[int, StoragePath]]:
        """The steps and paths of all checkpoints, including damaged ones, in the order of their steps."""
        return self._found(self.suffix)

    def hidden_name(self, token: int) -> str:
        """A name for a folder that is not a checkpoint yet, or no longer one; `remove_partial` deletes such folders.

        Args:
            token: Number of at most 32 bits.
        """
        return f".{self.basename}-{token:08x}"

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps: training has gone back, and must not resume from them."""
        for later, path in self.by_step():
            if later > step:
                abandoned = path.with_name(path.name + ABANDONED_SUFFIX)
                if self.are_folders and abandoned.exists():  # a folder cannot replace one that is not empty
                    self._delete(abandoned)
                rename(path, abandoned)

    def delete_old(self, keep: int | None) -> None:
        """Delete all but the `keep` newest by step, and all but the `keep` last written of those set aside."""
        if keep is None:
            return
        abandoned = [path for _, path in self._found(self.suffix + ABANDONED_SUFFIX)]
        abandoned.sort(key=lambda path: (modified_ns(path), path.name))
        for path in [*(path for _, path in self.by_step()[:-keep]), *abandoned[:-keep]]:
            self._delete(path)

    def _found(self, suffix: str) -> list[tuple[int, StoragePath]]:
        named = [(step, self.directory / name) for step, name in names_by_step(self.directory, self.basename, suffix)]
        return [(step, path) for step, path in named if self._is_checkpoint(path)]

    def _is_checkpoint(self, path: StoragePath) -> bool:
        if isinstance(path, RemotePath):
            return True
        return path.is_dir() if self.are_folders else path.is_file()  # reading a pipe would block forever

    def _delete(self, path: StoragePath) -> None:
        if isinstance(path, Path) and self.are_folders:
            # If the process is killed meanwhile, what remains must not have the name of a checkpoint.
            hidden = path.with_name(self.hidden_name(secrets.randbits(32)))
            path.rename(hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink(missing_ok=True)
