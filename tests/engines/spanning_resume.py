"""Trains with a `Checkpoint`, and continues where another run of it was ended: on other devices, in other processes, at
another level, or by plain Keras.

    python -m tests.engines.spanning_resume FOLDER STRATEGY
    phalanx run --workers 2 -m tests.engines.spanning_resume FOLDER STRATEGY

STRATEGY is an expression such as "ShardedStrategy(level=3)", or "plain". What happens, by environment variables:

    DEVICES      the number of CPU devices of this process, where `phalanx run` does not say it
    PREEMPT      after this step of this run rank 0 gets SIGTERM
    DIE, VICTIM  after this step of the job's first attempt this rank is killed
    DELAY        so many seconds later, whatever it does then
    EVERY        the interval of the checkpoints, in steps; each is finished before the next step is over
    EPOCHS       how many
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

import phalanx
from phalanx.callbacks import Checkpoint
from phalanx.config.job_config import run_of_job
from phalanx.engines.spmd import placement
from phalanx.engines.spmd.global_arrays import fetch
from phalanx.errors import PreemptedError
from tests.support.seeds import set_random_seed

BATCH, SAMPLES, WIDTH = 8, 44, 32
STEPS = 6  # in an epoch; the last batch has four samples
EPOCHS = int(os.environ.get("EPOCHS", "6"))
EVERY = int(os.environ.get("EVERY", "2"))
WRITTEN_BOUND_S = 60.0
TRANSFERRED = "transferred.npz"


class Disturbed(keras.callbacks.Callback):  # type: ignore[misc]
    """On all ranks: what is to happen to this process after a step, and when each step was done."""

    def __init__(self, rank: int, folder: Path):
        super().__init__()
        self.rank = rank
        self.log = open(folder / f"steps.{rank}", "a")  # noqa: SIM115  # until the process is gone
        self.steps = itertools.count(1)  # of this run: no plain number, which the checkpoint would bring back

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = next(self.steps)
        attempt, number = run_of_job()[1], int(self.model.optimizer.iterations.value)
        print(time.time(), attempt, number, logs["loss"], file=self.log, flush=True)
        if self.rank == 0 and done == int(os.environ.get("PREEMPT", "-1")):
            os.kill(os.getpid(), signal.SIGTERM)
        wait_for_checkpoint()
        is_victim = self.rank == int(os.environ.get("VICTIM", "-1")) and attempt == 0
        if is_victim and done == int(os.environ["DIE"]):
            delay_s = float(os.environ.get("DELAY", "0"))
            threading.Timer(delay_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
            if not delay_s:
                signal.pause()


def wait_for_checkpoint() -> None:
    """Until what this process writes is written: the machine may be slow, and the test says what a kill may cost."""
    for thread in threading.enumerate():
        if thread.name in ("phalanx-checkpoint", "phalanx-sharded-checkpoint"):
            thread.join(WRITTEN_BOUND_S)
            assert not thread.is_alive()


def main(folder: Path, expression: str) -> None:
    placement.MIN_SHARDED_SIZE = 4
    if "DEVICES" in os.environ:
        config: Any = jax.config
        config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
    strategy = None if expression == "plain" else eval(f"phalanx.{expression}", {"phalanx": phalanx})
    rank = 0 if strategy is None else strategy.rank
    set_random_seed(1)
    model = build(strategy)
    transferred = phalanx.ShardedCheckpoint(folder / "transferred", keep=1)
    if transferred.restore(model) is not None:
        check_transferred(model, folder)
    model = build(strategy)
    x = np.random.default_rng(0).normal(size=(SAMPLES, WIDTH)).astype("float32")
    saved = Checkpoint(folder / "checkpoints", every_steps=EVERY, keep=2)
    callbacks = [saved, Disturbed(rank, folder)]
    try:
        model.fit(x, x[:, ::-1].copy(), batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    except PreemptedError:
        transferred.save(model, step=int(model.optimizer.iterations.value))
        transferred.wait()
        save(model, folder / TRANSFERRED, rank)
        raise
    save(model, folder / "result.npz", rank)
    print(f"rank {rank} has finished: {phalanx.data.ledger()[EPOCHS - 1].min()}")


def build(strategy: Any) -> Any:
    with strategy.scope() if strategy is not None else keras.name_scope("plain"):
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dropout(0.1, seed=7),
                keras.layers.Dense(WIDTH),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def save(model: Any, path: Path, rank: int) -> None:
    values = {str(index): fetch(variable.value) for index, variable in enumerate(everything(model))}
    if rank == 0:
        history = {f"history {name}": value for name, value in model.history.history.items()}
        np.savez(path, **values, **history)


def check_transferred(model: Any, folder: Path) -> None:
    with np.load(folder / TRANSFERRED) as expected:
        for index, variable in enumerate(everything(model)):
            np.testing.assert_array_equal(fetch(variable.value), expected[str(index)], err_msg=variable.path)


def everything(model: Any) -> list[Any]:
    return [*model.trainable_variables, *model.optimizer.variables]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
