"""Asynchronous training on a dataset that is shuffled again in each pass; every epoch uses each sample once.

    passes_program.py FOLDER EPOCHS [VICTIM]

The victim kills its process in the second epoch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import phalanx
from tests.support.seeds import set_random_seed

SAMPLES, RETURN_BOUND_S = 200, 240


class Labels(keras.metrics.Metric):
    """The sum of all labels."""

    def __init__(self) -> None:
        super().__init__(name="labels")
        self.total = self.add_weight(name="total", shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32")))

    def result(self) -> Any:
        return self.total + 0.0


class Disturb(keras.callbacks.Callback):
    """Ends the victim once; the chief waits for it before the fourth epoch, of which each worker then has a part."""

    def __init__(self, folder: Path, rank: int, victim: str) -> None:
        super().__init__()
        self._folder, self._rank, self._victim = folder, rank, victim
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if (self._folder / "killed").exists() and self._victim == f"worker/{self._rank}":
            (self._folder / "returned").touch()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        until = time.monotonic() + RETURN_BOUND_S
        while self._rank == 0 and epoch == 3 and self._victim and not (self._folder / "returned").exists():
            if time.monotonic() > until:
                raise TimeoutError(f"{self._victim} did not return")
            time.sleep(0.05)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with (self._folder / f"{self._rank}.epochs").open("a") as file:
            file.write(f"{self._epoch}\n")
        if self._epoch == 1 and self._victim == f"worker/{self._rank}" and not (self._folder / "killed").exists():
            (self._folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    folder, epochs, victim = Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:])
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
        phalanx.ParameterServerStrategy()
        return
    strategy = phalanx.ParameterServerStrategy()
    x = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32")
    y = np.arange(SAMPLES, dtype="float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=4 if victim else None).batch(10)
    set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), "mse", metrics=[Labels()])
    # Another dataset: a chief that is restarted comes to it first.
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=5).batch(50), epochs=2, verbose=0)
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    history = model.fit(
        data, epochs=epochs, verbose=0, callbacks=[backup, Disturb(folder, strategy.rank, victim)]
    ).history
    (folder / f"{strategy.rank}.labels").write_text(json.dumps(history["labels"]))


if __name__ == "__main__":
    main()
