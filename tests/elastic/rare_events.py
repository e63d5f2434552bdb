"""A loss and a metric of rare samples, which the chief's part of the first batch lacks, and that of a worker that joins
has: what the chief found out about them holds for both.

    rare_events.py FOLDER
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

import phalanx

BATCH, RARE = 24, 7.0
folder = Path(sys.argv[1])


class Largest(keras.metrics.Metric):
    """The largest error of a rare sample."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.error = self.add_weight(name="error", shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = keras.ops.where(y_true == RARE, keras.ops.abs(y_true - y_pred), 0.0)
        self.error.assign(keras.ops.maximum(self.error, keras.ops.max(errors)))

    def result(self) -> Any:
        return self.error + 0.0


def sum_of_rare(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sum(keras.ops.where(y_true == RARE, (y_true - y_pred) ** 2, 0.0))


class Disturb(keras.callbacks.Callback):
    """Kills the last rank once; the others then wait in each step, so that it can join."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        killed = folder / "killed"
        if batch == 5 and strategy.rank == 2 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if strategy._replica.world_size < 3:
            time.sleep(0.3)


x = np.random.default_rng(0).normal(size=(BATCH * 10, 4)).astype("float32")
y = np.zeros((len(x), 1), "float32")
y.reshape(-1, BATCH)[:, 9] = RARE  # rank 1 of three has it, and rank 0 of two
strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1e-5), sum_of_rare, metrics=[Largest()])
history = model.fit(x, y, batch_size=BATCH, epochs=8, shuffle=False, verbose=0, callbacks=[Disturb()]).history
(folder / f"found.{strategy.rank}").write_text(
    json.dumps(
        {"members": strategy._replica.world_size, "loss": history["loss"][-1], "largest": history["largest"][-1]}
    )
)
