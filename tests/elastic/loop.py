"""A custom loop in an elastic job: the sum of numbers, each counted by one member."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import phalanx


def main(folder: Path) -> None:
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    first_life = not (folder / f"{task}").exists()
    (folder / f"{task}").touch()
    strategy = phalanx.MultiWorkerMirroredStrategy()
    replica = strategy._replica
    state = phalanx.elastic.State(step=0, total=0.0, resets=0, seen=np.zeros(0, np.int64))

    def note() -> None:
        state.resets += 1
        assert len(strategy.gather(np.ones(1), axis=0)) == replica.world_size  # on all members, newcomers included

    state.register_reset_callbacks([note])

    @phalanx.elastic.run
    def train(state: phalanx.elastic.State) -> float:
        while state.step < 40:
            own = [n for n in range(12) if n % replica.world_size == replica.rank]
            part = np.array([state.step * 12 + n for n in own], np.float64).sum()
            if task == 1 and first_life and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            total = strategy.reduce("SUM", np.array(part), axis=None)
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
