"""Trains with sharded checkpoints; the first time, rank RANK is killed after epoch EPOCH:

phalanx run --workers 2 --max-restarts 1 -m tests.engines.spanning_restart FOLDER RANK EPOCH
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from phalanx.config.job_config import run_of_job
from phalanx.engines.spmd.global_arrays import fetch

EPOCHS = 5


class SavesEachEpoch(keras.callbacks.Callback):  # type: ignore[misc]
    """On all ranks: each writes its part. Kills this process after one of the epochs, unless None."""

    def __init__(self, checkpoint: phalanx.ShardedCheckpoint, killed_after: int | None):
        super().__init__()
        self.checkpoint = checkpoint
        self.killed_after = killed_after

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.checkpoint.save(self.model, epoch + 1)
        if epoch + 1 == self.killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, logs: Any = None) -> None:
        self.checkpoint.wait()


def main(folder: Path, victim: int, epoch: int) -> None:
    strategy = phalanx.ShardedStrategy(level=3)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(32)])
        model.compile("adam", "mse")
    checkpoint = phalanx.ShardedCheckpoint(folder / "checkpoints", keep=2)
    restored = checkpoint.restore(model)
    first = 0 if restored is None else restored["step"]
    print(f"rank {strategy.rank} begins with epoch {first}")
    x = np.random.default_rng(0).normal(size=(22, 32)).astype("float32")
    is_killed = run_of_job()[1] == 0 and strategy.rank == victim
    saves = SavesEachEpoch(checkpoint, epoch if is_killed else None)
    model.fit(x, x, batch_size=8, epochs=EPOCHS, initial_epoch=first, shuffle=False, verbose=0, callbacks=[saves])
    weights = [fetch(variable.value) for variable in model.variables]
    if strategy.is_chief:
        np.savez(folder / "weights.npz", *weights)
    print(f"rank {strategy.rank} has finished; steps {checkpoint.steps}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
