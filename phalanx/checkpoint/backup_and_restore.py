"""Keras's `BackupAndRestore(save_freq=number)`: training continues right after the step of the backup.

(Keras alone continues with the first step of that epoch, and so repeats some steps.)
"""

from __future__ import annotations

import json
from typing import Any

import keras

from phalanx.keras_compat.callback_bases import flatten_callbacks
from phalanx.keras_compat.saving.remote_files import exists, read_text


def saves_mid_epoch(callbacks: Any) -> bool:
    """Whether a backup is written in the middle of epochs."""
    return _find(callbacks) is not None


def step_of_backup(callbacks: Any) -> int:
    """Number of steps of its epoch that the restored backup contains; 0 without a backup, or if it covers whole
    epochs."""
    callback = _find(callbacks)
    if callback is None:
        return 0
    if not (exists(callback._training_metadata_path) and exists(callback._weights_path)):
        return 0
    # Keras writes the index of the last batch whose step is included in the weights.
    return int(json.loads(read_text(callback._training_metadata_path))["batch"]) + 1


def _find(callbacks: Any) -> Any:
    for callback in flatten_callbacks(callbacks):
        if isinstance(callback, keras.callbacks.BackupAndRestore) and type(callback.save_freq) is int:
            return callback
    return None
