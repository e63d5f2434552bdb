"""What a server keeps on disk, so that another process can take its place."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

_NUMBER, _HEADER = "number", "header"


class Snapshots:
    """Two files, written in turn: whatever happens while one is written, the other is whole.

    A file is an archive of NumPy's (`numpy.savez`), whose checksums tell a damaged one. It may have no name: a path
    like /dev/fd/5 leads to a file that only the launcher holds, and that is gone when the job is.

    Args:
        paths: of the two files; they need not exist.
    """

    def __init__(self, paths: tuple[Path, Path]):
        self._paths = paths
        self._number = 0

    @classmethod
    def of_task(cls, folder: Path, name: str) -> Snapshots:
        """Those of a task, `ps/0`, in a folder, which is made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        base = name.replace("/", "-")
        return cls((folder / f"{base}.a.npz", folder / f"{base}.b.npz"))

    def write(self, header: bytes, arrays: Sequence[Array]) -> None:
        """Replace the older snapshot.

        Raises: OSError if the disk is full or cannot be written; the newer snapshot is still there then, and stays
            there until another one is whole.
        """
        number = self._number + 1
        raw = {str(index): np.ascontiguousarray(a).reshape(-1).view(np.uint8) for index, a in enumerate(arrays)}
        with open(self._paths[number % 2], "wb") as file:
            np.savez(file, **{_NUMBER: np.int64(number), _HEADER: np.frombuffer(header, np.uint8)}, **raw)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        self._number = number  # not before: what comes after a failure goes to the same file

    def newest(self) -> tuple[bytes, list[memoryview]] | None:
        """The header and the arrays' bytes of the newest snapshot that is whole; None if there is none."""
        found = [content for path in self._paths if (content := _read(path)) is not None]
        if not found:
            return None
        self._number, header, buffers = max(found, key=lambda content: content[0])
        return header, buffers

    def clear(self) -> None:
        """Forget all: the job is over."""
        for path in self._paths:
            if path.is_file() and path.stat().st_nlink:
                path.unlink()


def _read(path: Path) -> tuple[int, bytes, list[memoryview]] | None:
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            count = len(archive.files) - 2
            buffers = [memoryview(archive[str(index)]) for index in range(count)]
            return int(archive[_NUMBER]), archive[_HEADER].tobytes(), buffers
    except Exception as error:  # zipfile raises almost anything, by which byte it is that has changed
        logger.warning("The snapshot in %s is damaged and left aside: %s", path, error)
        return None
