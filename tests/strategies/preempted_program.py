"""A custom loop that is preempted after some steps, as `PreemptionCheckpointHandler` has it; both ranks run it.

    python -m tests.strategies.preempted_program FOLDER HOW

HOW is `signal` (rank 1 gets SIGTERM) or `never`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import phalanx
from tests.supervisor.models import make_data, make_model

STEPS, PREEMPTED_AT = 6, 3


def straight() -> Any:
    """What one process trains without a preemption."""
    model = make_model()
    x, y = make_data()
    for step in range(STEPS):
        model.train_on_batch(x[16 * step : 16 * step + 16], y[16 * step : 16 * step + 16])
    return model


def weights_of(model: Any) -> list[Any]:
    return [np.asarray(weight).tolist() for weight in model.get_weights()]


def main(folder: Path, how: str) -> None:
    strategy = phalanx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model(seed=1 + strategy.rank)  # the handler gives all the chief's
    resolver = strategy.cluster_resolver
    handler = phalanx.experimental.PreemptionCheckpointHandler(resolver, model, folder / f"preempted-{strategy.rank}")
    began = handler.total_run_calls
    x, y = make_data()
    while (step := handler.total_run_calls) < STEPS:
        batch = slice(16 * step, 16 * step + 16)
        handler.run(model.train_on_batch, x[batch], y[batch])
        if how == "signal" and step == PREEMPTED_AT and strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    found = {"began": began, "weights": weights_of(model), "straight": weights_of(straight())}
    (folder / f"result-{strategy.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
