"""Trains on digits in an elastic job, and logs what happens, one line each.

    program.py FOLDER [--epochs N] [--kill TASK:LIFE:SECONDS ...] [--exit|--terminate TASK:LIFE:STEP ...]
               [--hold SECONDS] [--gate STEP]

`--kill worker/1:1:0.4`: worker 1, in its first process, is killed (-9) 0.4 s after its first step, wherever it is then.
`--kill worker/1:1:10th`: ... after its tenth step.
`--exit worker/1:1:10`, `--terminate ...`: it ends with code 0 after its tenth step; at SIGTERM, by `sys.exit(0)`.
`--hold`: a step takes this long while a member is missing, so that a restarted one can join.
`--gate 5`: after its fifth step every member waits until FOLDER/go exists.
FOLDER gets one file for each process of a task, `worker-1.2.log`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import phalanx
from tests.support.digits import load_digits
from tests.support.seeds import set_random_seed

GATE_BOUND_S = 120.0


def life_of(folder: Path, task: str) -> int:
    """How many times this task has been started, this time included."""
    life = 1
    while True:
        try:
            (folder / f"{task.replace('/', '-')}.{life}.log").touch(exist_ok=False)
            return life
        except FileExistsError:
            life += 1


class Batches(keras.utils.PyDataset):
    """Global batches of 64, the first one as it is and the others in an order of their own if there is a seed."""

    def __init__(self, x: Any, y: Any, seed: int | None = None):
        super().__init__()
        self._x, self._y = x.copy(), y.copy()
        if seed is not None:
            order = 64 + np.random.default_rng(seed).permutation(len(x) - 64)
            self._x[64:], self._y[64:] = x[order], y[order]

    def __len__(self) -> int:
        return -(-len(self._x) // 64)

    def __getitem__(self, index: int) -> Any:
        rows = slice(64 * index, 64 * (index + 1))
        return self._x[rows], self._y[rows]


class Log:
    """A file of one life."""

    def __init__(self, path: Path):
        self._path = path

    def note(self, event: str, **facts: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **facts}) + "\n")


def wait_for_end_of(log: Path) -> None:
    """Return when the process that writes this log has ended."""
    pid = json.loads(log.read_text().partition("\n")[0])["pid"]
    until = time.monotonic() + GATE_BOUND_S
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} did not end in time")
        time.sleep(0.02)


class Gate:
    """Opened by a file; closed to steps of this number and later ones."""

    def __init__(self, file: Path, step: int):
        self._file, self._step = file, step

    def pass_with(self, steps: int) -> None:
        until = time.monotonic() + GATE_BOUND_S
        while steps >= self._step and not self._file.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"{self._file} was not created in time")
            time.sleep(0.02)


class Watch(keras.callbacks.Callback):
    """Logs steps, and kills its process at the requested time."""

    def __init__(
        self, log: Log, strategy: Any, members: int, kill: str | None, hold_s: float, gate: Gate | None = None
    ):
        super().__init__()
        self._log, self._strategy, self._members, self._hold_s = log, strategy, members, hold_s
        self._kill, self._gate = kill, gate
        self._epoch = self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        members = self._strategy._replica.world_size
        self._log.note("step", epoch=self._epoch, step=batch, members=members, rank=self._strategy.rank)
        self._steps += 1
        self._die_if_told()
        if self._gate is not None:
            self._gate.pass_with(self._steps)
        if members < self._members:
            time.sleep(self._hold_s)

    def _die_if_told(self) -> None:
        if self._kill is not None and self._kill.endswith("th"):
            if self._steps == int(self._kill.removesuffix("th")):
                self._die(0.0)
        elif self._kill is not None:
            threading.Thread(target=self._die, args=(float(self._kill),), daemon=True).start()
            self._kill = None

    def _die(self, after_s: float) -> None:
        time.sleep(after_s)
        self._log.note("killed")
        os.kill(os.getpid(), signal.SIGKILL)


class Beginning(keras.callbacks.Callback):
    """What is done at a beginning is this rank's own matter where it comes in the middle, and what a rank was made with
    stays its own."""

    def __init__(self, task: str, x: Any, y: Any):
        super().__init__()
        self.task, self._own, self._data = task, (task,), (x[:64], y[:64])

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.evaluate(*self._data, verbose=0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.evaluate(*self._data, verbose=0)
        rate = self.model.optimizer.learning_rate
        self.model.optimizer.learning_rate = 0.8 * float(keras.ops.convert_to_numpy(rate))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert (self.task,) == self._own


class Leave(keras.callbacks.Callback):
    """Ends its process with code 0 in the middle of the training."""

    def __init__(self, log: Log, step: int, *, by_signal: bool):
        super().__init__()
        self._log, self._left, self._by_signal = log, step, by_signal
        if by_signal:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._log.note("left")
            if not self._by_signal:
                os._exit(0)
            os.kill(os.getpid(), signal.SIGTERM)


class Logits(keras.layers.Dense):
    """A layer with a `call` of its own, which is tested before the first step, also where a process joins."""

    def call(self, inputs: Any) -> Any:
        return super().call(inputs)


def cross_entropy(labels: Any, logits: Any) -> Any:
    """A loss that is tested before the first step, as well."""
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def model(convolutional: bool, dropout: float = 0.0, *, units: int = 64, optimizer: Any = "adam") -> Any:
    layers = keras.layers
    first = (
        [layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
        if convolutional
        else [layers.Flatten(), layers.Dense(units, activation="relu")]
    )
    made = keras.Sequential([keras.Input((8, 8, 1)), *first, layers.Dropout(dropout), Logits(10)])
    made.compile(optimizer, cross_entropy, metrics=["accuracy"])
    return made


def model_of_words() -> Any:
    """Its words are the shades of the pixels: each occurs many times in a batch."""
    inputs = keras.Input((8, 8, 1))
    words = keras.ops.cast(keras.ops.reshape(inputs, (-1, 64)) * 16, "int32")
    rows = keras.layers.Embedding(17, 4)(words)
    made = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(rows)))
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


def loader(x: Any, y: Any) -> Any:
    import torch

    samples = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.DataLoader(samples, batch_size=64, shuffle=True, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1437)
    parser.add_argument("--kill", action="append", default=[])
    parser.add_argument("--exit", action="append", default=[])
    parser.add_argument("--terminate", action="append", default=[])
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--gate", type=int)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--period", type=int, help="DiLoCo, with so many steps between two exchanges")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--cnn", action="store_true")
    parser.add_argument("--words", action="store_true", help="a model of embeddings")
    parser.add_argument("--batches", action="store_true", help="the data come as a PyDataset, without validation")
    parser.add_argument("--loader", action="store_true", help="... as a DataLoader with a generator of its own")
    parser.add_argument("--returns-with", help="a task that was restarted has another model, data, ...")
    options = parser.parse_args()
    cluster = json.loads(os.environ["TF_CONFIG"])
    task = f"{cluster['task']['type']}/{cluster['task']['index']}"
    life = life_of(options.folder, task)
    log = Log(options.folder / f"{task.replace('/', '-')}.{life}.log")
    log.note("started", pid=os.getpid())
    kills = {(t, int(n)): s for t, n, s in (kill.rsplit(":", 2) for kill in options.kill)}
    set_random_seed(3)
    if options.period:
        strategy: phalanx.Strategy = phalanx.DiLoCoStrategy(options.period)
    else:
        # Few micro-batches, into which three members and two cut a batch differently.
        cut = {"deterministic": True, "micro_batches": 7} if options.deterministic else {}
        communication = phalanx.CommunicationOptions(**cut)
        strategy = phalanx.MultiWorkerMirroredStrategy(communication_options=communication)
    log.note("joined" if not strategy._replica.is_candidate else "candidate")
    images, labels = load_digits()
    x, y = (images / 16).reshape(-1, 8, 8, 1).astype("float32")[: options.samples], labels[: options.samples]
    other = options.returns_with if life > 1 else None
    if other == "data":
        y = np.roll(y, 1)
    others = {"units": 65} if other == "model" else {"optimizer": "sgd"} if other == "optimizer" else {}
    with strategy.scope():
        net = model_of_words() if options.words else model(options.cnn, 0.2 * options.deterministic, **others)
    gate = Gate(options.folder / "go", options.gate) if options.gate else None
    watch = Watch(log, strategy, len(cluster["cluster"]["worker"]), kills.get((task, life)), options.hold, gate)
    leaves = [
        Leave(log, int(leave.rpartition(":")[2]), by_signal=leave in options.terminate)
        for leave in (*options.exit, *options.terminate)
        if leave.startswith(f"{task}:{life}:")
    ]
    paces = (
        [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(options.pace))]
        if options.pace
        else []
    )
    if options.batches:
        data: dict[str, Any] = {"x": Batches(x, y, life if options.returns_with == "order" else None)}
    elif options.loader:
        data = {"x": loader(x, y)}
    else:
        data = {"x": x, "y": y, "batch_size": 64, "validation_split": 0.1}
    if options.words:
        data["shuffle"] = False  # an elastic job shuffles in another order than a fixed one
    history = net.fit(
        **data, epochs=options.epochs, callbacks=[watch, Beginning(task, x, y), *paces, *leaves], verbose=0
    )
    evaluated = slice(100 if other == "evaluation" else None)
    loss = net.evaluate(x[evaluated], y[evaluated], verbose=0)
    if options.returns_with == "evaluation":
        wait_for_end_of(options.folder / "worker-1.2.log")  # while the job goes on, or the launcher ends it
    weights = np.concatenate([np.ravel(keras.ops.convert_to_numpy(v)) for v in net.weights])
    if strategy.is_chief:
        np.save(options.folder / "weights.npy", weights)
        counts = {}
        if strategy._replica.elastic is not None and not options.batches:
            counts = {epoch: sorted(set(used.tolist())) for epoch, used in phalanx.data.ledger().items()}
        (options.folder / "result.json").write_text(
            json.dumps({"history": history.history, "loss": loss, "ledger": counts})
        )
    log.note("finished", rank=strategy.rank, weights=float(np.abs(weights).sum()))


if __name__ == "__main__":
    main()
    sys.exit(0)
