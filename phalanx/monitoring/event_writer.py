"""Writes event files for TensorBoard without TensorFlow."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from phalanx.errors import ConfigurationError
from phalanx.storage.mirror import MirroredDirectory
from phalanx.storage.paths import StoragePath

PACKAGE = "tensorboardX"


def is_available() -> bool:
    """Whether event files can be written."""
    return importlib.util.find_spec(PACKAGE) is not None


class EventWriter:
    """Writes scalars for TensorBoard. The first scalar creates the file.

    Raises: ConfigurationError naming the package that is not installed.
    """

    def __init__(self, directory: StoragePath):
        if not is_available():
            raise ConfigurationError(
                f"Event files for TensorBoard in {str(directory)!r} need the package {PACKAGE}, which is not "
                f"installed: `pip install {PACKAGE}`."
            )
        self._directory = directory
        self._folder: MirroredDirectory | None = None
        self._writer: Any = None

    def scalars(self, values: Mapping[str, Any], step: int) -> None:
        """Write numbers by name. They are in the file when this returns. Elements of an array (such as one score per
        class) are named by index: `f1_score/0`.

        Raises: OSError if they cannot be written.
        """
        self._folder = self._folder or MirroredDirectory(self._directory)
        if self._writer is None:
            self._writer = importlib.import_module(PACKAGE).SummaryWriter(logdir=str(self._folder.path))
        for name, value in values.items():
            numbers = np.asarray(value, np.float64)
            for index in np.ndindex(numbers.shape):
                self._writer.add_scalar("/".join([name, *map(str, index)]), float(numbers[index]), step)
        self._writer.flush()
        self._folder.upload()

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        folder, self._folder = self._folder, None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if folder is not None:
            folder.upload()
            folder.close()
