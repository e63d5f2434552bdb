"""What `phalanx plan --topology` examines: a model that a strategy divides over devices.

python divided_program.py STRATEGY WIDTH FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np

import phalanx

STRATEGIES = {
    "whole": phalanx.TPUStrategy,
    "sharded": phalanx.ShardedStrategy,
    "optimizer": lambda: phalanx.ShardedStrategy(level=1),
    "parallel": lambda: phalanx.ModelParallelStrategy(mesh_shape=(2, len(keras.distribution.list_devices()) // 2)),
    "workers": phalanx.MultiWorkerMirroredStrategy,
}


def main() -> None:
    width = int(sys.argv[2])
    strategy = STRATEGIES[sys.argv[1]]()
    with strategy.scope():
        hidden = keras.layers.Dense(width, activation="relu")
        model = keras.Sequential([keras.Input((width,)), hidden, keras.layers.Dense(width)])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.zeros((64, width), np.float32)
    saver = keras.callbacks.ModelCheckpoint(Path(sys.argv[3]) / "model.keras")
    model.fit(x, x, batch_size=4 * strategy.num_replicas_in_sync, validation_split=0.25, callbacks=[saver])
    (Path(sys.argv[3]) / "went on").touch()


if __name__ == "__main__":
    main()
