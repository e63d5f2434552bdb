"""A second `fit` that depends on what the first one has left in the callbacks, the optimizer and the weights.

two_fits.py FOLDER [kill]
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
from tests.support.seeds import set_random_seed

folder, kills = Path(sys.argv[1]), "kill" in sys.argv


class Disturb(keras.callbacks.Callback):
    """Kills the last rank once; the others then wait in each step, so that it can join."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        killed = folder / "killed"
        if kills and batch == 5 and strategy.rank == 2 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if strategy._replica.world_size < 3:
            time.sleep(0.3)


set_random_seed(3)
x = np.random.default_rng(0).normal(size=(240, 4)).astype("float32")
y = x[:, :1] * 2
strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
stopping = keras.callbacks.EarlyStopping("loss", min_delta=0.5, patience=1)
lower = keras.callbacks.ReduceLROnPlateau("loss", min_delta=0.5, patience=1)
model.fit(x, y, batch_size=24, epochs=9, shuffle=False, verbose=0, callbacks=[stopping, lower])
pseudo = keras.ops.convert_to_numpy(model(x)) + stopping.best
rate = float(model.optimizer.learning_rate) / 5
model.compile(keras.optimizers.SGD(rate), "mse")
epochs = 8 + stopping.best_epoch
history = model.fit(x, pseudo, batch_size=24, epochs=epochs, shuffle=False, verbose=0, callbacks=[Disturb()]).history
(folder / f"found.{strategy.rank}").write_text(
    json.dumps({"members": strategy._replica.world_size, "rate": rate, "loss": history["loss"]})
)
