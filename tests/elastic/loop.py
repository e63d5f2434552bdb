"""A custom loop in an elastic job: the sum of numbers, each counted by one member, from a dataset made before it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from operator import itemgetter
from pathlib import Path

import keras
import numpy as np

import phalanx

STEPS, BATCH = 8, 12  # of an epoch


class Numbers(keras.utils.PyDataset):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (np.arange(BATCH, dtype=np.float64) + index * BATCH,)


def main(folder: Path) -> None:
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    first_life = not (folder / f"{task}").exists()
    (folder / f"{task}").touch()
    strategy = phalanx.MultiWorkerMirroredStrategy()
    replica = strategy._replica
    dataset = strategy.experimental_distribute_dataset(Numbers())
    state = phalanx.elastic.State(step=0, total=0.0, resets=0, seen=np.zeros(0, np.int64))

    def note() -> None:
        state.resets += 1
        assert len(strategy.gather(np.ones(1), axis=0)) == replica.world_size  # on all members, newcomers included

    state.register_reset_callbacks([note])

    @phalanx.elastic.run
    def train(state: phalanx.elastic.State) -> float:
        while state.step < 5 * STEPS:
            epoch, done = divmod(state.step, STEPS)
            for numbers in itertools.islice(map(itemgetter(0), dataset), done, None):
                part = np.asarray(numbers, np.float64) + epoch * STEPS * BATCH
                if task == 1 and first_life and state.step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                total = strategy.reduce("SUM", part.sum(), axis=None)
                state.total += float(np.asarray(total))
                state.step += 1
                state.commit()
                if replica.world_size < 3:
                    time.sleep(1.5)  # so that it is not over before the lost one is back
        return state.total

    result = train(state)
    (folder / f"result-{task}").write_text(json.dumps([result, replica.world_size, state.resets]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
