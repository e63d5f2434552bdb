"""Which of Keras's callbacks write files, where, and in which of their methods.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from phalanx.storage.paths import StoragePath, is_url, storage_path
from phalanx.storage.remote_path import has_store

ORBAX = [keras.callbacks.OrbaxCheckpoint] if hasattr(keras.callbacks, "OrbaxCheckpoint") else []  # not in Keras 3.12
_METHODS: dict[type, tuple[str, tuple[str, ...]]] = {
    keras.callbacks.ModelCheckpoint: ("filepath", ("_save_model",)),
    keras.callbacks.BackupAndRestore: ("backup_dir", ("_save_model", "on_train_end")),
    **dict.fromkeys(ORBAX, ("directory", ("_save_checkpoint",))),
}
"""By class: the attribute with the path, and the methods that write or delete there."""
SAVERS = tuple(_METHODS)


def written_path(callback: Any) -> StoragePath | None:
    """Return where one of `SAVERS` writes: a file, a directory, or a pattern for several; None for a URL left to Keras
    (`remote_files`)."""
    attribute = _entry(callback)[0]
    path = str(getattr(callback, attribute))
    if is_url(path) and (isinstance(callback, tuple(ORBAX)) or not has_store(path)):
        return None
    return storage_path(path, attribute).absolute()


def writing_methods(callback: Any) -> tuple[str, ...]:
    """Return the methods of one of `SAVERS` that write or delete."""
    return _entry(callback)[1]


@contextmanager
def writing_atomically(callback: Any) -> Iterator[None]:
    """Context in which one of `SAVERS` may write or delete. What it writes to a local file system appears whole or not
    at all, even if the process is killed.

    In a job, `model.save` and `save_weights` ensure this for all callbacks. BackupAndRestore writes its step itself.
    """
    if not isinstance(callback, keras.callbacks.BackupAndRestore) or is_url(callback._training_metadata_path):
        yield
        return
    place = callback._training_metadata_path
    callback._training_metadata_path = part = f"{place}.part"
    try:
        Path(part).unlink(missing_ok=True)  # left by a process that was killed
        if os.path.exists(place):  # the callback may copy it first (`double_checkpoint`)
            shutil.copyfile(place, part)
        yield
        if os.path.exists(part):
            os.replace(part, place)
    finally:
        callback._training_metadata_path = place


def finish_writing(callback: Any) -> None:
    """Wait until one of `SAVERS` has written what its methods have begun."""
    if hasattr(callback, "wait_until_finished"):  # OrbaxCheckpoint, which is not in Keras 3.12
        callback.wait_until_finished()


def _entry(callback: Any) -> tuple[str, tuple[str, ...]]:
    return next(entry for kind, entry in _METHODS.items() if isinstance(callback, kind))
