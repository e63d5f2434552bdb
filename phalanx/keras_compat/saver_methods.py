"""Which of Keras's callbacks write files, where, and in which of their methods.

Tested with Keras 3.12 and 3.15.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from phalanx.config.local_paths import is_url

ORBAX = [keras.callbacks.OrbaxCheckpoint] if hasattr(keras.callbacks, "OrbaxCheckpoint") else []  # not in Keras 3.12
_METHODS: dict[type, tuple[str, tuple[str, ...]]] = {
    keras.callbacks.ModelCheckpoint: ("filepath", ("_save_model",)),
    keras.callbacks.BackupAndRestore: ("backup_dir", ("_save_model", "on_train_end")),
    **dict.fromkeys(ORBAX, ("directory", ("_save_checkpoint",))),
}
"""By class: the attribute that says where, and the methods that write or delete there."""
SAVERS = tuple(_METHODS)


def written_path(callback: Any) -> Path | None:
    """Where one of `SAVERS` writes: a file, a directory, or a pattern for several; None if in no local file system."""
    path = str(getattr(callback, _entry(callback)[0]))
    return None if is_url(path) else Path(path).absolute()


def writing_methods(callback: Any) -> tuple[str, ...]:
    """The methods of one of `SAVERS` that write or delete."""
    return _entry(callback)[1]


def _entry(callback: Any) -> tuple[str, tuple[str, ...]]:
    return next(entry for kind, entry in _METHODS.items() if isinstance(callback, kind))
