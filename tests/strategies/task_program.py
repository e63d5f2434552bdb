"""A program of a task that has several replicas: `python -m tests.strategies.task_program FOLDER`."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from tests.support.seeds import set_random_seed


def trained(strategy: Any) -> dict[str, Any]:
    random = np.random.default_rng(5)
    x = random.normal(size=(52, 4)).astype("float32")  # the last batch is no multiple of the replicas
    set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    history = model.fit(x, x.sum(axis=1, keepdims=True), batch_size=20, epochs=2, verbose=0)
    return {"history": history.history, "weights": model.get_weights()}


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = phalanx.MultiWorkerMirroredStrategy()
    resolver = phalanx.cluster_resolver.TFConfigClusterResolver()
    found = trained(strategy)
    assert phalanx.MultiWorkerMirroredStrategy().num_replicas_in_sync == strategy.num_replicas_in_sync
    found |= {
        "replicas": strategy.num_replicas_in_sync,
        "task": (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id),
        "own task": (resolver.task_type, resolver.task_id),
        "workers": len(strategy.cluster_resolver.cluster_spec().ranked_tasks),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }
    if strategy.is_chief:
        found["plain"] = trained(phalanx.OneDeviceStrategy("cpu:0"))
    (folder / f"rank-{strategy.rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
