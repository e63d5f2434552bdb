"""A local folder for code that can only write to a file system, such as the writers of TensorBoard event files."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from phalanx.storage.files import copy_file, identity_of
from phalanx.storage.paths import StoragePath
from phalanx.storage.remote_path import Identity, RemotePath
from phalanx.storage.temporary_directory import temporary_directory

logger = logging.getLogger(__name__)


class MirroredDirectory:
    """A local folder whose files are copied to a target: the target itself, or a temporary folder for one in a store.

    Attributes:
        path: The local folder.
    """

    def __init__(self, target: StoragePath) -> None:
        self._target = target
        self._uploaded: dict[Path, Identity] = {}  # identity of each file's content in the store
        self._closing = contextlib.ExitStack()
        self.path = target if isinstance(target, Path) else self._closing.enter_context(temporary_directory())

    def upload(self) -> None:
        """Upload changed files. Each file is uploaded whole, because stores cannot append to objects.

        If the store does not respond, warn; the next call uploads what is missing.
        """
        if isinstance(self._target, RemotePath):
            try:
                self._upload(self._target)
            except OSError as error:
                logger.warning(
                    "Logs cannot be written to %s: %s. The next upload is tried as usual.", self._target, error
                )

    def _upload(self, folder: RemotePath) -> None:
        for path in sorted(each for each in self.path.rglob("*") if each.is_file()):
            # Before the copy: if the file grows meanwhile, its identity differs next time.
            identity = identity_of(path.stat())
            if self._uploaded.get(path) != identity:
                target = folder
                for part in path.relative_to(self.path).parts:
                    target = target / part
                target.parent.mkdir()
                copy_file(path, target)
                self._uploaded[path] = identity

    def close(self) -> None:
        """Remove the temporary folder. Safe to call twice."""
        self._closing.close()
