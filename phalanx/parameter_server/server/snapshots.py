"""Snapshots on disk, from which another process can take over from a server."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.runtime.write_claim import WriteClaim

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

_NUMBER, _HEADER = "number", "header"


class Snapshots:
    """Two files, written alternately: if writing one is interrupted, the other is complete.

    A file is a NumPy archive (`numpy.savez`), whose checksums reveal damage. It may have no name: a path such as
    /dev/fd/5 leads to a file that only the launcher keeps open, and that disappears with the job.

    Args:
        paths: Paths of the two files; they need not exist.
        claim: Right to write the files; None if no other process can have their paths.
    """

    def __init__(self, paths: tuple[Path, Path], claim: WriteClaim | None = None):
        self._paths = paths
        self._claim = claim
        self._number = 0

    @classmethod
    def of_task(cls, folder: Path, name: str) -> Snapshots:
        """Snapshots of a task, such as `ps/0`, in a folder, which is created if it is missing.

        Raises: see `WriteClaim.acquire`; raised if another live process writes them.
        """
        base = name.replace("/", "-")
        claim = WriteClaim(folder, base)
        claim.acquire()
        return cls((folder / f"{base}.a.npz", folder / f"{base}.b.npz"), claim)

    def write(self, header: bytes, arrays: Sequence[Array]) -> None:
        """Replace the older snapshot.

        Raises:
            OSError: the disk is full or not writable; the newer snapshot is kept until another one is complete.
            SupersededError: another process writes these snapshots now.
        """
        number = self._number + 1
        # Bytes: the .npy format has no bfloat16 and would read it back as void. The header contains the dtypes.
        raw = {str(index): np.ascontiguousarray(a).reshape(-1).view(np.uint8) for index, a in enumerate(arrays)}
        with self._writing(), open(self._paths[number % 2], "wb") as file:
            np.savez(file, **{_NUMBER: np.int64(number), _HEADER: np.frombuffer(header, np.uint8)}, **raw)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        self._number = number  # not earlier: after a failure, the next snapshot is written to the same file

    def newest(self) -> tuple[bytes, list[memoryview]] | None:
        """The header and the arrays' bytes of the newest complete snapshot; None if there is none."""
        found = [content for path in self._paths if (content := _read(path)) is not None]
        if not found:
            return None
        self._number, header, buffers = max(found, key=lambda content: content[0])
        return header, buffers

    def clear(self) -> None:
        """Delete the files, because the job is over."""
        with self._writing():
            for path in self._paths:
                if path.is_file() and path.stat().st_nlink:  # no links: the launcher's file without a name
                    path.unlink()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._claim is None else self._claim.writing()


def _read(path: Path) -> tuple[int, bytes, list[memoryview]] | None:
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            count = len(archive.files) - 2
            buffers = [memoryview(archive[str(index)]) for index in range(count)]
            return int(archive[_NUMBER]), archive[_HEADER].tobytes(), buffers
    except Exception as error:  # the error from zipfile depends on which byte is damaged
        logger.warning("The snapshot in %s is damaged and ignored: %s", path, error)
        return None
