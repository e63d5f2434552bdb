"""Trains on two ranks that think that they are on different hosts.

phalanx run --workers 2 --timeline-filename t.json -m tests.training.timeline_program [kill]
"""

from __future__ import annotations

import json
import os
import signal
import sys

if len(sys.argv) == 1:  # else on one host: what the other rank writes after a death must not travel over the dead one
    os.environ["PHALANX_HOST_ID"] = f"host-{json.loads(os.environ['TF_CONFIG'])['task']['index']}"

import keras
import numpy as np

import phalanx


class Killed(keras.callbacks.Callback):
    """Rank 1 dies after some epochs, each of which takes longer than events wait in memory."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if len(sys.argv) > 1 and epoch == 2 and strategy.rank == 1:
            phalanx.monitoring.timeline.current._flush()  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)


strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(256), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
model.fit(x, x[:, :1], batch_size=16, epochs=4, verbose=0, validation_data=(x, x[:, :1]), callbacks=[Killed()])
