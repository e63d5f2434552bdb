"""A program whose functions each add 1 to all weights: `python -m tests.coordinator.counting FOLDER`.

One worker is still at the beginning while the chief changes the learning rate several times. Then functions wait
to be run while the chief, under a supervisor, saves.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from phalanx.coordinator import ClusterCoordinator
from tests.coordinator.program import until

FUNCTIONS = 30
LOOK_AFTER = (5, 15)
LATE_S = 3.0


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = phalanx.ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    weights, optimizer = model.trainable_variables, model.optimizer
    supervisor = phalanx.Supervisor(folder / "run", save_model_secs=0)
    with supervisor.managed_session(model) as session:
        coordinator = ClusterCoordinator(strategy)

        def make(context: phalanx.InputContext) -> int:
            if context.input_pipeline_id == 1:
                time.sleep(LATE_S)  # no event: the chief may wait for a function that was sent here
            return context.input_pipeline_id

        def add_one(own: int) -> int:
            time.sleep(0.01)
            optimizer.apply([keras.ops.zeros(weight.shape) - 1 for weight in weights], weights)
            return own

        own = coordinator.create_per_worker_values(make)
        for _ in range(3):
            optimizer.learning_rate = optimizer.learning_rate / 2
            coordinator.schedule(add_one, args=(own,))
            coordinator.join()
        seen: set[int] = set()

        def both_have_run() -> bool:
            seen.update(coordinator.fetch([coordinator.schedule(add_one, args=(own,)) for _ in range(8)]))
            return seen == {0, 1}

        until(both_have_run, "the second worker runs nothing")
        coordinator.join()
        model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
        optimizer.iterations.assign(0)
        optimizer.learning_rate = 1.0

        looks: list[Any] = []
        results = [coordinator.schedule(add_one, args=(own,)) for _ in range(FUNCTIONS)]
        for number in LOOK_AFTER:
            coordinator.fetch(results[number])
            saved = session.save()
            looks.append(str(saved))
        coordinator.join()
        looks.append(str(session.save()))
    (folder / "looks").write_text(json.dumps(looks))


if __name__ == "__main__":
    main()
