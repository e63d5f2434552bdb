"""A custom loop that calls `fit`, in an elastic job."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import phalanx
from tests.support.seeds import set_random_seed

EPOCHS = 40


def main(folder: Path) -> None:
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = phalanx.MultiWorkerMirroredStrategy()
    set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    state = phalanx.elastic.State(model=model, epoch=0, sizes=[])

    def disturb(batch: int, logs: object) -> None:
        if task == 1 and (state.epoch, batch) == (1, 3) and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    disturbs = keras.callbacks.LambdaCallback(on_train_batch_begin=disturb)

    @phalanx.elastic.run
    def train(state: phalanx.elastic.State) -> None:
        while state.epoch < EPOCHS:
            model.fit(x, x.sum(-1), batch_size=12, verbose=0, shuffle=False, callbacks=[disturbs])
            state.epoch += 1
            state.sizes = [*state.sizes, strategy._replica.world_size]
            if state.sizes[-1] < 3:
                time.sleep(0.5)  # so that it is not over before the lost one is back
            state.commit()

    train(state)
    weights = [array.tolist() for array in model.get_weights()]
    (folder / f"result-{task}").write_text(json.dumps([state.epoch, state.sizes, weights]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
