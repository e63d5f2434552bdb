"""`SidecarEvaluatorModelExport`: the evaluator's best model, as a file that Keras loads."""

from __future__ import annotations

import os
from typing import Any

import keras

from phalanx.checkpoint.step_names import KERAS_SUFFIX, WEIGHTS_SUFFIX, last_number
from phalanx.storage.files import list_names
from phalanx.storage.paths import storage_path


class SidecarEvaluatorModelExport(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model that a `phalanx.SidecarEvaluator` found best (`tf.keras.callbacks.SidecarEvaluatorModelExport`).

        export = phalanx.callbacks.SidecarEvaluatorModelExport("best-{epoch}.keras", "runs/1", monitor="accuracy")
        phalanx.SidecarEvaluator(model, data, "runs/1", callbacks=[export]).start()

    The evaluator also keeps the best checkpoint itself, as `best_evaluation.*`. This callback saves a whole model
    (`.keras`), or weights under a name of your choice.

    Args:
        export_filepath: Path of the file, like `filepath` of `ModelCheckpoint`. `{epoch}` is the last number in the
            name of the newest checkpoint.
        checkpoint_filepath: Directory in which the training saves, or the beginning of its checkpoints' names.
        kwargs: Arguments of `ModelCheckpoint`: `monitor` (default `loss`), `mode`, `save_weights_only`, ...
    """

    def __init__(
        self, export_filepath: str | os.PathLike[str], checkpoint_filepath: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        kwargs = {**kwargs, "monitor": kwargs.get("monitor", "loss").removeprefix("val_")}
        super().__init__(filepath=export_filepath, save_best_only=True, **kwargs)
        self._checkpoints = storage_path(checkpoint_filepath, "checkpoint_filepath")

    def on_test_begin(self, logs: Any = None) -> None:
        is_directory = self._checkpoints.is_dir()
        directory = self._checkpoints if is_directory else self._checkpoints.parent
        prefix = "" if is_directory else self._checkpoints.name
        found = [
            number
            for name in list_names(directory)
            if name.startswith(prefix) and name.endswith((WEIGHTS_SUFFIX, KERAS_SUFFIX))
            if (number := last_number(name)) is not None
        ]
        # Keras counts epochs from 0 and puts `epoch + 1` into the name.
        self._current_epoch = max(found, default=1) - 1

    def on_test_end(self, logs: Any = None) -> None:
        if self.monitor_op is None:
            self._set_monitor_op()
        self._save_model(epoch=self._current_epoch, batch=None, logs=logs)
