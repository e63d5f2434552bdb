"""`Checkpoint`: saves what a `fit` needs to resume at the same step."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint.checkpoint_directory import CheckpointDirectory
from phalanx.errors import ConfigurationError, UnsupportedError
from phalanx.keras_compat.callback_bases import ChiefCallback
from phalanx.storage.files import write_file
from phalanx.storage.paths import StoragePath

logger = logging.getLogger(__name__)

DEFAULT_KEEP = 3


class Checkpoint(ChiefCallback):
    """Saves everything that `fit` needs to resume at the same step, and resumes when the program is restarted: weights,
    optimizer, epoch, step, order and position of the data, random state of the layers, metrics, `History`, and the
    state of other callbacks.

    The chief writes in a background thread: training pauses only while the state is copied. A checkpoint that becomes
    due while another one is still being written waits for it. If a checkpoint cannot be written (a full disk), Phalanx
    warns and tries the next one; older checkpoints are kept.

    If one program spans the devices of several processes, every process writes its part. The directory must be visible
    to all of them. The checkpoints are those of `phalanx.ShardedCheckpoint`, and need orbax-checkpoint. A job of either
    kind resumes from checkpoints of the other, on any number of devices and processes.

    Each `fit` of a program has its own checkpoints, numbered by the calls with the same directory. When the program is
    restarted, a `fit` that was complete returns its result immediately. (With more `epochs` than before, it continues.)
    To start from the beginning, pass another directory.

    The directory contains `fit0-000000120.weights.h5`, of step 120 of the first `fit`, which `model.load_weights` also
    reads, and `fit0-ledger.json`: how often each sample was used in each epoch (`phalanx.data.ledger`).

    While such a `fit` runs, SIGTERM (or `--preemption-signal`) to any process of the job saves after the next step, and
    exits with code 75. A second signal has its normal effect.

    Args:
        directory: Directory on the chief's host; a shared directory if the chief may move to another host, or if every
            process writes.
        every_steps: Number of steps between two checkpoints; None: see `every_seconds`.
        every_seconds: Seconds between two checkpoints, unless `every_steps` comes first; neither: after each epoch.
        keep: Number of newest checkpoints to keep.

    Raises: ConfigurationError for invalid arguments; and in `fit`, on all ranks, if a checkpoint is of another model or
        of data of another size.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = DEFAULT_KEEP,
    ):
        super().__init__()
        if every_steps is not None and (not isinstance(every_steps, int) or every_steps < 1):
            raise ConfigurationError(f"every_steps is {every_steps!r}; write a number of steps from 1 up, or None.")
        if every_seconds is not None and not 0 < every_seconds < math.inf:
            raise ConfigurationError(f"every_seconds is {every_seconds!r}; write seconds greater than 0, or None.")
        if not os.fspath(directory):
            raise ConfigurationError("The directory for the checkpoints is empty; name one.")
        CheckpointDirectory(directory, keep=keep)  # checks `keep`
        self.directory = os.fspath(directory)
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.keep = keep
        self.is_managed_by_fit = False
        """Whether the running `fit` saves for this callback."""

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if not self.is_managed_by_fit:
            raise UnsupportedError(
                "phalanx.callbacks.Checkpoint does not work with Keras's own `fit`. In a program without a strategy, "
                "import it at the top (`from phalanx.callbacks import Checkpoint`), before any line that refers to "
                "`model.fit`. With parameter servers use `phalanx.Supervisor` or snapshots (snapshot_dir=...)."
            )


def write_ledger(path: StoragePath, content: Mapping[str, Any]) -> None:
    """Write the readable ledger, completely or not at all."""
    try:
        write_file(path, json.dumps(content).encode())
    except OSError as error:
        logger.warning("The ledger %s cannot be written: %s.", path, error.strerror or error)
