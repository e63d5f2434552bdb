"""An elastic program for Keras as Horovod's documentation has it: `fit` inside of `hvd.elastic.run`, with callbacks.

phalanx run -np 3 --min-np 2 keras_program.py FOLDER

Worker 1 is killed (-9) in its first life, between two commits. The others go on, and wait for it before the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx.horovod.keras as hvd
from tests.horovod.elastic.lives import Life, until_others_come
from tests.support.seeds import set_random_seed

SAMPLES, BATCH, STEPS, EPOCHS = 96, 8, 4, 5


class Fate(keras.callbacks.Callback):
    """Kills and waits."""

    def __init__(self, life: Life, state: Any):
        super().__init__()
        self._life, self._state = life, state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._life.is_first_of(1) and self._state.epoch == 1 and batch == 2:
            self._life.die()
        if hvd.size() < 3 and self._state.epoch >= 2:
            until_others_come(self._state.check_host_updates)


class Notes(keras.callbacks.Callback):
    """Notes how many batches an epoch had. It comes before the commit, at which another member may join."""

    def __init__(self, life: Life):
        super().__init__()
        self._life, self._batches = life, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._life.note("epoch", size=hvd.size(), rank=hvd.rank(), batches=self._batches)
        self._batches = 0


def batches(x: Any, y: Any) -> Any:
    """This rank's, endlessly."""
    while True:
        for start in range(hvd.rank() * BATCH, SAMPLES, hvd.size() * BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]


def main(folder: Path) -> None:
    life = Life(folder)
    hvd.init()
    life.note("joined", rank=hvd.rank(), size=hvd.size())
    set_random_seed(life.index + 10 * life.number)  # so only what is synchronised is alike
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, 4)).astype("float32")
    y = (x @ np.array([[1.0], [-2.0], [0.5], [3.0]]) + 0.5).astype("float32")
    layers = [keras.layers.Dense(8), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), "mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0, resets=0)

    def on_reset() -> None:
        state.resets += 1
        life.note("reset", size=hvd.size(), rank=hvd.rank(), epoch=state.epoch, batch=state.batch)

    state.register_reset_callbacks([on_reset])

    @hvd.elastic.run
    def train(state: Any) -> None:
        iterations = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        flat = np.concatenate([np.ravel(w) for w in [*model.get_weights(), *_moments(model)]])
        alike = hvd.allgather_object(flat.tolist())
        life.note(
            "began",
            size=hvd.size(),
            rank=hvd.rank(),
            iterations=iterations,
            epoch=state.epoch,
            batch=state.batch,
            alike=all(each == alike[0] for each in alike),
        )
        model.fit(
            batches(x, y),
            steps_per_epoch=STEPS,
            epochs=EPOCHS - state.epoch,
            verbose=0,
            callbacks=[
                Notes(life),
                hvd.callbacks.MetricAverageCallback(),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                Fate(life, state),
            ],
        )

    train(state)
    life.note(
        "finished",
        rank=hvd.rank(),
        size=hvd.size(),
        epoch=state.epoch,
        batch=state.batch,
        iterations=int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
        weights=[np.ravel(w).tolist() for w in model.get_weights()],
        loss=float(model.evaluate(x, y, verbose=0)),
    )


def _moments(model: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable) for variable in model.optimizer.variables]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
