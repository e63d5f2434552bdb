"""Trains on digits with checkpoints, and writes down what happens: the job that chaos comes over.

    program.py FOLDER CHECKPOINTS [--epochs N] [--pace SECONDS] [--hold SECONDS] [--every STEPS]

FOLDER gets one file for each life of a task, as in `tests.elastic.program`, and in the end the chief's result. On
SIGUSR1 a process breaks off one of its connections to the other members.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from tests.elastic.program import Log, Watch, life_of, model
from tests.support.digits import load_digits
from tests.support.seeds import set_random_seed

BATCH = 64
VALIDATION = 0.1
LONGEST_S = 3.0
"""Of the time by which one step takes longer while a member is missing."""


class Hold(keras.callbacks.Callback):
    """While a member is missing each step takes longer than the one before it: the job is not to end before the member
    is back, however long a start takes on a busy machine."""

    def __init__(self, log: Log, strategy: Any, members: int, hold_s: float):
        super().__init__()
        self._log = log
        self._strategy, self._members, self._hold_s = strategy, members, hold_s
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        missing = self._strategy._replica.world_size < self._members
        self._steps = self._steps + 1 if missing else 0
        if missing:
            time.sleep(min(self._hold_s * self._steps, LONGEST_S))
            self._log.note("held")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1437)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that each step takes longer")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds more while a member is missing, growing")
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    cluster = json.loads(os.environ["TF_CONFIG"])
    task = f"{cluster['task']['type']}/{cluster['task']['index']}"
    members = len(cluster["cluster"]["worker"])
    life = life_of(options.folder, task)
    log = Log(options.folder / f"{task.replace('/', '-')}.{life}.log")
    log.note("started", pid=os.getpid(), task=task)
    set_random_seed(3)
    strategy = phalanx.MultiWorkerMirroredStrategy()
    signal.signal(signal.SIGUSR1, lambda *_: break_off(strategy))
    images, labels = load_digits()
    x, y = (images / 16).reshape(-1, 8, 8, 1).astype("float32")[: options.samples], labels[: options.samples]
    with strategy.scope():
        net = model(False)
    callbacks = [
        phalanx.callbacks.Checkpoint(options.checkpoints, every_steps=options.every),
        Watch(log, strategy, members, None, 0.0),
        Hold(log, strategy, members, options.hold),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(options.pace)),
    ]
    history = net.fit(
        x,
        y,
        batch_size=BATCH,
        validation_split=VALIDATION,
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=0,
    )
    loss = net.evaluate(x, y, verbose=0)
    if strategy.is_chief:
        weights = np.concatenate([np.ravel(keras.ops.convert_to_numpy(v)) for v in net.weights])
        counts = {str(epoch): sorted(set(used.tolist())) for epoch, used in phalanx.data.ledger().items()}
        result = {"history": history.history, "loss": loss, "ledger": counts, "weights": weights.tolist()}
        temporary = options.folder / f".result.{os.getpid()}"
        temporary.write_text(json.dumps(result))
        temporary.replace(options.folder / "result.json")
    log.note("finished", rank=strategy.rank)


def break_off(strategy: Any) -> None:
    """As when the network resets a connection: both ends hear of it."""
    links = list(strategy._replica.communicator.membership.links.values())
    if links and not links[0].closed:
        socket.socket.shutdown(links[0]._sock, socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
