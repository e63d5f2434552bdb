"""Keras's `BackupAndRestore(save_freq=number)`: its backups say after which step they were made, so training goes on
there.

(Keras alone goes on with the first step of that epoch, and so makes some steps twice.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras

from phalanx.training.callback_list import flat


def keeps_steps(callbacks: Any) -> bool:
    """Whether a backup is made in the middle of epochs."""
    return _of_steps(callbacks) is not None


def step_of_backup(callbacks: Any) -> int:
    """How many steps of its epoch a backup has that was just restored; 0 if there is none, or it is of whole epochs."""
    callback = _of_steps(callbacks)
    if callback is None:
        return 0
    note = Path(callback._training_metadata_path)
    if not note.exists() or not Path(callback._weights_path).exists():
        return 0
    return int(json.loads(note.read_text())["batch"]) + 1


def _of_steps(callbacks: Any) -> Any:
    for callback in flat(callbacks):
        if isinstance(callback, keras.callbacks.BackupAndRestore) and type(callback.save_freq) is int:
            return callback
    return None
