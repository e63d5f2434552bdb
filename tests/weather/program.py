"""Trains on digits with replicas or with servers, schedules functions, or leaves, and writes down what came of it.

program.py RESULT replicas|synchronous|asynchronous|coordinator|leaving
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from phalanx.strategies.current_job import current_replica
from tests.support.digits import load_digits
from tests.support.seeds import set_random_seed

BATCH, EPOCHS = 128, 2
FUNCTIONS = 10
LAST_WORDS_BYTES = 50_000


def strategy_of(kind: str) -> Any:
    match kind:
        case "replicas":
            return phalanx.MultiWorkerMirroredStrategy()
        case "synchronous":
            return phalanx.ParameterServerStrategy(synchronous=True, replication=2)
    return phalanx.ParameterServerStrategy()


def leave_with_much_to_say(path: Path) -> None:
    """Rank 0 sends something that takes as long as the others need to become impatient, and leaves at once."""
    phalanx.MultiWorkerMirroredStrategy()
    replica = current_replica()
    assert replica is not None
    replica.communicator.barrier()
    received = replica.communicator.broadcast_bytes(bytes(LAST_WORDS_BYTES))
    phalanx.leave_job()
    if replica.rank:
        path.write_text(json.dumps({"whole": len(received) == LAST_WORDS_BYTES}))


def main(path: Path, kind: str) -> None:
    if kind == "leaving":
        leave_with_much_to_say(path)
        return
    set_random_seed(3)
    strategy = strategy_of(kind)
    if kind == "coordinator":
        coordinator = phalanx.coordinator.ClusterCoordinator(strategy)
        values = [coordinator.schedule(abs, args=(-number,)) for number in range(FUNCTIONS)]
        coordinator.join()
        path.write_text(json.dumps({"values": coordinator.fetch(values)}))
        return
    images, labels = load_digits()
    x, y = (images / 16).astype("float32"), labels
    with strategy.scope():
        net = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.SGD(0.05), loss)
    history = net.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    final = net.evaluate(x, y, verbose=0)
    if strategy.is_chief:
        weights = np.concatenate([np.ravel(keras.ops.convert_to_numpy(v)) for v in net.weights])
        losses = [*history.history["loss"], final]
        path.write_text(json.dumps({"losses": losses, "weights": weights.tolist()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
