"""The program that `benchmarks.plan` predicts and runs: an MLP with one core per replica.

    plan_program.py WIDTH BATCH EPOCHS [FOLDER]

With FOLDER, rank 0 writes the seconds of each epoch of `STEPS` steps to FOLDER/epochs.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Before importing JAX, which counts cores: hosts that are namespaces of one machine would use the same cores.
RANK = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORES[RANK % len(CORES)]})
os.environ["PJRT_NPROC"] = "1"

import keras  # noqa: E402
import numpy as np  # noqa: E402

import phalanx  # noqa: E402

STEPS = 20
FEATURES, CLASSES = 784, 10


class EpochTimes(keras.callbacks.Callback):
    """Records the seconds of each epoch except the first, which compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._began_at = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began_at = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            self.seconds.append(time.perf_counter() - self._began_at)


def main() -> None:
    width, batch, epochs = map(int, sys.argv[1:4])
    x = np.random.default_rng(0).random((STEPS * batch, FEATURES), dtype=np.float32)
    strategy = phalanx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(CLASSES)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    times = EpochTimes()
    model.fit(x, np.arange(len(x)) % CLASSES, batch_size=batch, epochs=epochs, callbacks=[times], verbose=0)
    if len(sys.argv) > 4 and strategy.is_chief:
        (Path(sys.argv[4]) / "epochs.json").write_text(json.dumps([seconds / STEPS for seconds in times.seconds]))


if __name__ == "__main__":
    main()
