"""A program that is killed or stopped, and then restarted: `test_resuming.py`.

python resumed_program.py CHECKPOINTS RESULT [dropout] [diloco] [topk]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import phalanx
from tests.support.digits import load_digits
from tests.support.seeds import set_random_seed

EPOCHS, BATCH = 4, 100
STEPS = 15


class AtStep(keras.callbacks.Callback):
    """Events for a test: pauses for `PAUSE` seconds after each step, so that there is time to act. The process of rank
    `VICTIM` dies at step `DIE` of its first life. Rank 0 reports its progress after each step."""

    def __init__(self, folder: Path, rank: int):
        super().__init__()
        self._folder = folder
        self._rank = rank
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._done += 1
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if self._rank == 0:
            Path(self._folder, "progress").write_text(str(self._done))
        mark = Path(self._folder, "died")
        is_victim = self._rank == int(os.environ.get("VICTIM", "-1"))
        if is_victim and self._done == int(os.environ["DIE"]) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    set_random_seed(1)
    x, y = load_digits()
    x, y = (x[: STEPS * BATCH] / 16).astype("float32"), y[: STEPS * BATCH]
    if "diloco" in sys.argv:
        strategy: phalanx.MultiWorkerMirroredStrategy = phalanx.DiLoCoStrategy(4, compression="float16")
    else:
        strategy = phalanx.MultiWorkerMirroredStrategy(
            compression=phalanx.compression.TopK(0.1) if "topk" in sys.argv else None
        )
    layers = [keras.Input((64,)), keras.layers.Dense(32, activation="relu")]
    if "dropout" in sys.argv:
        layers.append(keras.layers.Dropout(0.3))
    with strategy.scope():
        model = keras.Sequential([*layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Each replica of DiLoCo has its own moments, and a checkpoint keeps those of the chief.
        optimizer = keras.optimizers.SGD(0.1) if "diloco" in sys.argv else keras.optimizers.Adam(1e-2)
        model.compile(optimizer, loss, metrics=["accuracy"])
    # Keras begins each validation with the first two batches of a generator, then continues where it stopped reading.
    validation = ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH))
    folder.mkdir(exist_ok=True)
    (folder / f"process.{strategy.rank}").write_text(str(os.getpid()))
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        validation_data=validation,
        validation_steps=3,
        callbacks=[
            phalanx.callbacks.Checkpoint(folder, every_steps=int(os.environ.get("EVERY", "4"))),
            AtStep(folder, strategy.rank),
        ],
    )
    if strategy.is_chief:
        ledger = phalanx.data.ledger()
        once = sorted(ledger) == list(range(EPOCHS)) and all((counts == 1).all() for counts in ledger.values())
        losses = history.history["loss"] + history.history["val_loss"]
        np.savez(result, *model.get_weights(), losses=losses, epochs=history.epoch, once=once)


if __name__ == "__main__":
    main()
